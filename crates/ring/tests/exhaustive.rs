//! Every ring of four descriptors over a small alphabet of fields, walked by the device half and by
//! a statement of the specification's rules that shares no code with it.
//!
//! What must hold: a chain that the rules permit is taken as they say, buffer by buffer; any other
//! is refused. Nothing panics, reads beyond the table, or returns more buffers than the ring has.

use std::sync::Arc;

use ring::virtq::{Buf, DeviceQueue, Features, Layout, Taken};
use shm::{GuestMemory, Mapping, Region};

const SIZE: u16 = 4;
const BASE: u64 = 0x1000;
const DRIVER: u64 = BASE + 0x80;
const DEVICE: u64 = BASE + 0x100;
const TABLE: u64 = BASE + 0x200;
const LAYOUT: Layout = Layout { size: SIZE, desc: BASE, driver: DRIVER, device: DEVICE };

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A descriptor: flags, and `next` of a split ring, `id` of a packed one.
#[derive(Clone, Copy, Debug)]
struct Desc {
    flags: u16,
    link: u16,
}

/// An indirect table: two entries, and the length that its descriptor states.
#[derive(Clone, Copy, Debug)]
struct Table {
    entries: [Desc; 2],
    len: u32,
}

const fn desc(flags: u16, link: u16) -> Desc {
    Desc { flags, link }
}

/// Address and length tell a buffer's place: entry `at` of the ring (0) or of the table (1).
fn buf(place: u64, at: u16, write: bool) -> Buf {
    let n = place * 16 + u64::from(at);
    Buf { addr: 0x9000 + 64 * n, len: 100 + u32::try_from(n).unwrap(), write }
}

fn memory() -> GuestMemory {
    let mapping = Arc::new(Mapping::memfd("rings", 0x1000).unwrap());
    let region = Region { guest_addr: BASE, user_addr: 0, len: 0x1000, offset: 0, mapping };
    GuestMemory::new(vec![region]).unwrap()
}

fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    memory.seg_mut(addr, u32::try_from(bytes.len()).unwrap(), &mut 0).unwrap().write(bytes);
}

/// `packed`: the flags follow the link.
fn bytes(place: u64, at: u16, desc: Desc, table: &Table, packed: bool) -> [u8; 16] {
    let indirect = place == 0 && desc.flags & INDIRECT != 0;
    let Buf { addr, len, .. } = buf(place, at, false);
    let (addr, len) = if indirect { (TABLE, table.len) } else { (addr, len) };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    let [a, b] = if packed { [desc.link, desc.flags] } else { [desc.flags, desc.link] };
    bytes[12..14].copy_from_slice(&a.to_le_bytes());
    bytes[14..].copy_from_slice(&b.to_le_bytes());
    bytes
}

/// Takes the next chain of a new device half: its id and buffers; `None`: refused; no buffers: none
/// is available.
fn take(
    memory: &GuestMemory,
    features: Features,
    base: u32,
    taken: &mut Taken,
) -> Option<(u16, Vec<Buf>)> {
    taken.clear();
    let mut device = DeviceQueue::new(memory, &LAYOUT, features, base).unwrap();
    let took = device.take(memory, 1, taken);
    let result = match took {
        Ok(0) => Some((0, Vec::new())),
        Ok(n) => {
            assert_eq!((n, taken.chains.len()), (1, 1));
            let chain = taken.chains[0];
            let bufs = taken.reads(&chain).iter().chain(taken.writes(&chain));
            Some((chain.id, bufs.copied().collect()))
        }
        Err(fault) => {
            // It stays, whatever the ring has then.
            assert!(taken.chains.is_empty() && taken.bufs.is_empty());
            assert_eq!(device.take(memory, 1, taken), Err(fault));
            None
        }
    };
    device.untake(&taken.chains);
    result
}

/// Adds a buffer, by the rules of both rings: writable ones come last, and no more than the ring
/// has.
fn push(bufs: &mut Vec<Buf>, buf: Buf) -> Option<()> {
    let after_write = bufs.last().is_some_and(|last| last.write) && !buf.write;
    if after_write || bufs.len() == usize::from(SIZE) {
        return None;
    }
    bufs.push(buf);
    Some(())
}

/// Entries of a table that may be walked: whole ones, at least one, not more than the ring has.
fn entries(table: &Table) -> Option<u16> {
    let whole = table.len.is_multiple_of(16) && (1..=u32::from(SIZE)).contains(&(table.len / 16));
    whole.then(|| u16::try_from(table.len / 16).unwrap())
}

/// Entry of a table; behind those that were written there are zeroes.
fn entry(table: &Table, at: u16) -> Desc {
    table.entries.get(usize::from(at)).copied().unwrap_or(desc(0, 0))
}

fn table_buf(table: &Table, at: u16) -> Buf {
    let write = entry(table, at).flags & WRITE != 0;
    if usize::from(at) < table.entries.len() {
        buf(1, at, write)
    } else {
        Buf { addr: 0, len: 0, write }
    }
}

/// The rules of a split ring: virtio 1.3, 2.7.5.
fn split(ring: &[Desc; 4], head: u16, table: &Table, indirect: bool) -> Option<Vec<Buf>> {
    let (mut at, mut bufs, mut walked) = (head, Vec::new(), 0);
    loop {
        let desc = ring.get(usize::from(at))?;
        walked += 1;
        if walked > SIZE {
            return None;
        }
        if desc.flags & INDIRECT != 0 {
            if !indirect || desc.flags & NEXT != 0 {
                return None;
            }
            let entries = entries(table)?;
            let (mut at, mut walked) = (0, 0);
            loop {
                let desc = entry(table, at);
                walked += 1;
                if at >= entries || walked > entries || desc.flags & INDIRECT != 0 {
                    return None;
                }
                push(&mut bufs, table_buf(table, at))?;
                if desc.flags & NEXT == 0 {
                    return Some(bufs);
                }
                at = desc.link;
            }
        }
        push(&mut bufs, buf(0, at, desc.flags & WRITE != 0))?;
        if desc.flags & NEXT == 0 {
            return Some(bufs);
        }
        at = desc.link;
    }
}

/// The rules of a packed ring: virtio 1.3, 2.8.6 to 2.8.8.
fn packed(
    ring: &[Desc; 4],
    start: u16,
    wrap: bool,
    table: &Table,
    indirect: bool,
) -> Option<(u16, Vec<Buf>)> {
    let mut bufs = Vec::new();
    let flags = ring[usize::from(start)].flags;
    if (flags & AVAIL != 0) != wrap || (flags & USED != 0) == wrap {
        return Some((0, bufs));
    }
    for n in 0..SIZE {
        let at = (start + n) % SIZE;
        let desc = ring[usize::from(at)];
        if desc.flags & INDIRECT != 0 {
            if !indirect || n > 0 || desc.flags & NEXT != 0 {
                return None;
            }
            for at in 0..entries(table)? {
                if entry(table, at).flags & INDIRECT != 0 {
                    return None;
                }
                push(&mut bufs, table_buf(table, at))?;
            }
            return Some((desc.link, bufs));
        }
        push(&mut bufs, buf(0, at, desc.flags & WRITE != 0))?;
        if desc.flags & NEXT == 0 {
            return Some((desc.link, bufs));
        }
    }
    None
}

fn tables() -> Vec<Table> {
    let entries = [
        desc(0, 0),
        desc(WRITE, 0),
        desc(NEXT, 0),
        desc(NEXT, 1),
        desc(NEXT | WRITE, 1),
        desc(NEXT, 2),
        desc(INDIRECT, 0),
    ];
    let two = |(a, b): (Desc, Desc)| Table { entries: [a, b], len: 32 };
    let pairs = entries.iter().flat_map(|a| entries.iter().map(|b| (*a, *b)));
    let lens = [0, 8, 16, 40, 48, 64, 80, u32::MAX, u32::MAX - 15];
    let odd = lens.map(|len| Table { entries: [entries[3], entries[1]], len });
    pairs.map(two).chain(odd).collect()
}

/// Each ring of four entries of `alphabet`.
fn rings(alphabet: &[Desc]) -> impl Iterator<Item = [Desc; 4]> + '_ {
    let n = alphabet.len();
    (0..n.pow(4)).map(move |i| [0, 1, 2, 3].map(|digit| alphabet[i / n.pow(digit) % n]))
}

/// Tables that matter for a ring: one if no table is read.
fn tables_for<'a>(ring: &[Desc; 4], all: &'a [Table]) -> &'a [Table] {
    let reads = ring.iter().any(|desc| desc.flags & INDIRECT != 0);
    if reads { all } else { &all[..1] }
}

#[derive(Debug, Default)]
struct Counts {
    taken: u64,
    refused: u64,
    longest: usize,
}

impl Counts {
    fn compare(
        &mut self,
        got: Option<(u16, Vec<Buf>)>,
        want: Option<(u16, Vec<Buf>)>,
        what: impl FnOnce() -> String,
    ) {
        assert!(got == want, "{}: {got:?}, by the rules {want:?}", what());
        match got {
            Some((_, bufs)) => {
                self.taken += u64::from(!bufs.is_empty());
                self.longest = self.longest.max(bufs.len());
            }
            None => self.refused += 1,
        }
    }
}

#[test]
fn every_small_split_ring_is_walked_by_the_rules() {
    let mut alphabet: Vec<_> = [0, WRITE].map(|flags| desc(flags, 0)).into();
    // Whether a table is writable is ignored.
    alphabet.extend([0, NEXT, WRITE, NEXT | WRITE].map(|flags| desc(INDIRECT | flags, 0)));
    for next in 0..=SIZE {
        alphabet.extend([desc(NEXT, next), desc(NEXT | WRITE, next)]);
    }
    let (memory, tables, mut counts) = (memory(), tables(), Counts::default());
    let mut taken = Taken::with_capacity(1, SIZE);
    write(&memory, DRIVER + 2, &1_u16.to_le_bytes());
    for ring in rings(&alphabet) {
        for (n, table) in tables_for(&ring, &tables).iter().enumerate() {
            // With other tables, only rings whose first descriptors read one.
            if n > 0 && ring[..2].iter().all(|desc| desc.flags & INDIRECT == 0) {
                break;
            }
            for (at, desc) in (0..).zip(ring) {
                write(&memory, BASE + 16 * u64::from(at), &bytes(0, at, desc, table, false));
            }
            for (at, desc) in (0..).zip(table.entries) {
                write(&memory, TABLE + 16 * u64::from(at), &bytes(1, at, desc, table, false));
            }
            for head in 0..=if n == 0 { SIZE } else { 1 } {
                write(&memory, DRIVER + 4, &head.to_le_bytes());
                for indirect in [true, false] {
                    let features = Features { indirect, ..Features::default() };
                    let got = take(&memory, features, 0, &mut taken);
                    let want = split(&ring, head, table, indirect).map(|bufs| (head, bufs));
                    counts.compare(got, want, || format!("{ring:?} from {head}, {table:?}"));
                }
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.taken > 100_000 && counts.refused > 100_000 && counts.longest == 4);
}

#[test]
fn every_small_packed_ring_is_walked_by_the_rules() {
    let kinds = [0, WRITE, NEXT, NEXT | WRITE];
    let owned = kinds.map(|flags| [desc(flags, 2), desc(INDIRECT | flags, 2)]).concat();
    let (memory, tables, mut counts) = (memory(), tables(), Counts::default());
    let mut taken = Taken::with_capacity(1, SIZE);
    for ring in rings(&owned) {
        for (table, start) in
            tables_for(&ring, &tables).iter().flat_map(|t| (0..SIZE).map(move |s| (t, s)))
        {
            for bits in [0, AVAIL, USED, AVAIL | USED] {
                // Whose a descriptor is, is decided by the first of a chain alone.
                let mut ring = ring;
                for (at, desc) in ring.iter_mut().enumerate() {
                    *desc = Desc { flags: desc.flags | bits, link: u16::try_from(at).unwrap() + 9 };
                }
                for (at, desc) in (0..).zip(ring) {
                    write(&memory, BASE + 16 * u64::from(at), &bytes(0, at, desc, table, true));
                }
                for (at, desc) in (0..).zip(table.entries) {
                    write(&memory, TABLE + 16 * u64::from(at), &bytes(1, at, desc, table, true));
                }
                for wrap in [true, false] {
                    let half = u32::from(start) | u32::from(wrap) << 15;
                    // Base 0 of a fresh ring is read as 0x8000: wrap bits of UML.
                    if half == 0 && bits & USED == 0 {
                        continue;
                    }
                    let features =
                        Features { packed: true, indirect: start != 3, ..Features::default() };
                    let got = take(&memory, features, half | half << 16, &mut taken);
                    let want = packed(&ring, start, wrap, table, features.indirect);
                    counts
                        .compare(got, want, || format!("{ring:?} from {start}/{wrap}, {table:?}"));
                }
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.taken > 10_000 && counts.refused > 10_000 && counts.longest == 4);
}
