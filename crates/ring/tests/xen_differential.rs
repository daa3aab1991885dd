//! Our halves against halves made of the macros of Xen's own headers (`xen/io/ring.h` and
//! `netif.h`, in Debian's libxen-dev): a C program maps the ring's page and runs commands; what
//! crosses the ring, and whether to notify, must be the same on both sides.
//!
//! Needs a C compiler and libxen-dev; `./test` installs the latter.
#![cfg(not(loom))]
#![allow(clippy::as_conversions)]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};

use ring::xen::{
    Armed, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, Extra, FrontCtrl,
    FrontRx, FrontTx, GREF_ENTRY_LEN, Gso, Hash, Packet, RX_SLOT_LEN, RxPacket, RxRequest,
    RxResponse, SLOTS_PORTABLE, TX_SLOT_LEN, TxPacket, TxRequest, ctrl_status, ctrl_type, gso_type,
    rx_flag, status, tx_flag,
};
use shm::{Area, Mapping};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/xen_peer.c");
const STARTS: [u32; 3] = [0, u32::MAX - 20, 0x7fff_fff0];

/// The C program, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("xen_peer");
        let flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-o"];
        let cc = Command::new("cc").args(flags).arg(&out).arg(SOURCE).output();
        let cc = cc.expect("no C compiler: install gcc");
        let says = String::from_utf8_lossy(&cc.stderr);
        assert!(cc.status.success(), "install Xen's headers (apt-get install libxen-dev):\n{says}");
        out
    })
}

/// The other half.
struct Peer {
    child: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
    area: Area,
    file: PathBuf,
}

impl Peer {
    fn new(ring: &str, name: &str) -> Self {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let file = file.join(format!("ring-{ring}-{name}-{}", std::process::id()));
        let page = File::options().read(true).write(true).create(true).truncate(true).open(&file);
        let page = page.unwrap();
        page.set_len(4096).unwrap();
        let mapping = Arc::new(Mapping::new(page.as_fd(), 0, 4096).unwrap());
        let area = Area::of(&mapping, 0, 4096).unwrap();
        let mut command = Command::new(program());
        command.arg(ring).arg(&file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        Self { child, commands, replies, area, file }
    }

    /// Sends a command; returns the numbers of the reply.
    fn command(&mut self, command: &str, numbers: &[u32]) -> Vec<i64> {
        let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        writeln!(self.commands, "{command} {}", words.join(" ")).unwrap();
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        let numbers: Result<_, _> = line.split_whitespace().map(str::parse).collect();
        numbers.unwrap_or_else(|_| panic!("{command}: {line}"))
    }

    fn number(&mut self, command: &str) -> i64 {
        self.command(command, &[])[0]
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}

/// A reproducible sequence (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % u64::from(n)) as u32
    }
}

fn armed(armed: Armed) -> i64 {
    i64::from(armed == Armed::WorkPending)
}

fn words<T: Copy + Into<i64>>(words: &[T]) -> Vec<i64> {
    words.iter().map(|w| (*w).into()).collect()
}

/// An extra info as the C program prints it: type, more, and three numbers.
fn extra_numbers(extra: Extra, more: bool) -> [u32; 5] {
    let more = u32::from(more);
    let mac = |a: [u8; 6]| {
        let low = u32::from_le_bytes(a[..4].try_into().unwrap());
        (low, u32::from(u16::from_le_bytes(a[4..].try_into().unwrap())))
    };
    match extra {
        Extra::Gso(g) => [1, more, u32::from(g.size), u32::from(g.kind), u32::from(g.features)],
        Extra::McastAdd(addr) => [2, more, mac(addr).0, mac(addr).1, 0],
        Extra::McastDel(addr) => [3, more, mac(addr).0, mac(addr).1, 0],
        Extra::Hash(h) => [4, more, u32::from(h.kind), u32::from(h.algorithm), h.value],
    }
}

const GSO: Extra = Extra::Gso(Gso { size: 0x1234, kind: gso_type::TCPV6, features: 0xabcd });
const HASH: Extra = Extra::Hash(Hash { kind: 3, algorithm: 1, value: 0x89ab_cdef });
const MAC: [u8; 6] = [0x01, 0x00, 0x5e, 0x12, 0x34, 0x56];
const ADD: Extra = Extra::McastAdd(MAC);
const DEL: Extra = Extra::McastDel(MAC);

fn tx_request(random: &mut Random, id: u16) -> TxRequest {
    let flags = tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED;
    let (gref, offset) = (random.below(u32::MAX), random.below(2000) as u16);
    TxRequest { gref, offset, flags, id, size: 100 + random.below(1000) as u16 }
}

fn tx_numbers(r: TxRequest) -> [u32; 5] {
    [r.gref, r.offset.into(), r.flags.into(), r.id.into(), r.size.into()]
}

#[test]
fn our_tx_front_half_against_their_back_half() {
    for start in STARTS {
        let mut peer = Peer::new("tx", "front");
        let mut front = FrontTx::starting_at(peer.area.clone(), start);
        assert_eq!(peer.number("attach"), i64::from(front.size()));
        let mut random = Random(u64::from(start));
        let mut free: Vec<u16> = (0..256).collect();
        let (mut sent, mut taken, mut answered) =
            (VecDeque::new(), VecDeque::new(), VecDeque::new());
        for _ in 0..600 {
            match random.below(6) {
                0 => {
                    let n = random.below(5) as usize;
                    let extras: &[Extra] = [&[][..], &[GSO], &[GSO, HASH], &[ADD], &[DEL]][n];
                    let Some(id) = free.pop() else { continue };
                    let first = match n {
                        0..3 => tx_request(&mut random, id),
                        _ => TxRequest { id, ..TxRequest::default() },
                    };
                    if !front.add(first, extras, &[]) {
                        free.push(id);
                        continue;
                    }
                    let flag = if extras.is_empty() { 0 } else { tx_flag::EXTRA_INFO };
                    let first = TxRequest { flags: first.flags | flag, ..first };
                    sent.push_back((false, tx_numbers(first)));
                    for (i, extra) in extras.iter().enumerate() {
                        sent.push_back((true, extra_numbers(*extra, i + 1 < extras.len())));
                    }
                }
                1 => {
                    front.publish();
                    let _ = front.notify_needed();
                    assert_eq!(peer.number("reqs"), sent.len() as i64);
                }
                2 => {
                    front.publish();
                    let _ = front.notify_needed();
                    while let Some((extra, want)) = sent.pop_front() {
                        let order = if extra { "getreqx" } else { "getreq" };
                        assert_eq!(peer.command(order, &[]), words(&want));
                        taken.push_back((extra, want[3]));
                    }
                    // Armed at the last request: the next one published is notified.
                    assert_eq!(peer.number("finalreq"), 0);
                    if let Some(id) = free.pop() {
                        let first = tx_request(&mut random, id);
                        if front.add(first, &[], &[]) {
                            sent.push_back((false, tx_numbers(first)));
                            front.publish();
                            assert!(front.notify_needed());
                        } else {
                            free.push(id);
                        }
                    }
                }
                3 => {
                    for (extra, id) in taken.drain(..taken.len().min(random.below(9) as usize)) {
                        // Theirs may send any id with NULL.
                        let status = if extra { status::NULL } else { -(random.below(3) as i16) };
                        peer.command("rsp", &[id, status as u32]);
                        answered.extend((!extra).then_some((id as u16, status)));
                    }
                    let asleep = front.arm() == Armed::Armed;
                    let news = peer.number("pushrsp");
                    assert!(!asleep || news == i64::from(front.has_responses()));
                }
                _ => {
                    while let Some(r) = front.take_response().unwrap() {
                        assert_eq!(Some((r.id, r.status)), answered.pop_front());
                        free.push(r.id);
                    }
                }
            }
        }
    }
}

#[test]
fn our_tx_back_half_against_their_front_half() {
    for start in STARTS {
        let mut peer = Peer::new("tx", "back");
        assert_eq!(peer.command("init", &[start]), [256]);
        let mut back = BackTx::attach(peer.area.clone()).unwrap();
        let mut random = Random(u64::from(start) + 1);
        let mut packet = TxPacket::new();
        for round in 0..200_u16 {
            assert_eq!(armed(back.arm()), 0);
            let mut sent = Vec::new();
            while peer.number("free") >= 4 && random.below(20) > 0 {
                let n = sent.len() as u16;
                let first = TxRequest { size: 900, ..tx_request(&mut random, round ^ n) };
                let rest = TxRequest { flags: 0, size: 300, ..tx_request(&mut random, n) };
                let flags = first.flags | tx_flag::EXTRA_INFO | tx_flag::MORE_DATA;
                peer.command("req", &tx_numbers(TxRequest { flags, ..first }));
                let kind = random.below(3);
                let extra = [GSO, ADD, DEL][kind as usize];
                peer.command("reqx", &extra_numbers(HASH, true));
                peer.command("reqx", &extra_numbers(extra, false));
                if kind == 0 {
                    peer.command("req", &tx_numbers(rest));
                }
                sent.push((first, rest, kind));
            }
            assert_eq!(peer.number("pushreq"), i64::from(!sent.is_empty()));
            for (first, rest, kind) in &sent {
                let taken = back.take(&mut packet).unwrap().unwrap();
                assert_eq!(packet.hash.map(Extra::Hash), Some(HASH));
                let change = match kind {
                    0 => {
                        assert_eq!(taken, Packet::Frame);
                        assert_eq!(packet.gso.map(Extra::Gso), Some(GSO));
                        let got: Vec<_> =
                            packet.slots().iter().map(|s| (s.gref, s.offset, s.len)).collect();
                        let want = [(first.gref, first.offset, 600), (rest.gref, rest.offset, 300)];
                        assert_eq!(got, want);
                        continue;
                    }
                    1 => ring::xen::Multicast::Add(MAC),
                    _ => ring::xen::Multicast::Del(MAC),
                };
                assert_eq!(taken, Packet::Multicast(change));
            }
            assert_eq!(back.take(&mut packet), Ok(None));
            for _ in &sent {
                back.put(status::ERROR);
            }
            assert_eq!(peer.number("finalrsp"), 0);
            back.publish();
            assert_eq!(back.notify_needed(), !sent.is_empty());
            let slots: i64 = sent.iter().map(|(.., kind)| if *kind == 0 { 4 } else { 3 }).sum();
            assert_eq!(peer.number("rsps"), slots);
            for (first, rest, kind) in &sent {
                assert_eq!(peer.command("getrsp", &[]), [first.id.into(), -1]);
                assert_eq!(peer.command("getrsp", &[])[1], 1, "NULL");
                assert_eq!(peer.command("getrsp", &[])[1], 1, "NULL");
                if *kind == 0 {
                    assert_eq!(peer.command("getrsp", &[]), [rest.id.into(), -1]);
                }
            }
        }
    }
}

#[test]
fn our_rx_halves_against_theirs() {
    for start in STARTS {
        // Our front, their back.
        let mut peer = Peer::new("rx", "front");
        let mut front = FrontRx::starting_at(peer.area.clone(), start);
        assert_eq!(peer.number("attach"), 256);
        let mut random = Random(u64::from(start));
        let mut packet = RxPacket::new();
        for id in 0..200 {
            assert_eq!(peer.number("finalreq"), 0);
            let posted: Vec<_> = (0..3)
                .map(|n| RxRequest { id: id * 3 + n, gref: random.below(u32::MAX) })
                .collect();
            assert!(posted.iter().all(|r| front.post(*r)));
            front.publish();
            assert!(front.notify_needed());
            for r in &posted {
                assert_eq!(peer.command("getreq", &[]), [i64::from(r.id), i64::from(r.gref)]);
            }
            let len = 14 + random.below(4000);
            let flags = u32::from(rx_flag::EXTRA_INFO | rx_flag::MORE_DATA);
            peer.command("rsp", &[0, 96 - 14, flags, len]);
            peer.command("rspx", &extra_numbers(GSO, false));
            peer.command("rsp", &[0, 7, 0, 100]);
            assert_eq!(front.arm(), Armed::Armed);
            assert_eq!(peer.number("pushrsp"), 1);
            assert_eq!(front.take(&mut packet), Ok(Some(Ok(()))));
            let got: Vec<_> =
                packet.slots.iter().map(|s| (s.request, s.offset, u32::from(s.len))).collect();
            assert_eq!(got, [(posted[0], 82, len), (posted[2], 7, 100)]);
            assert_eq!((packet.spare[0], packet.gso.map(Extra::Gso)), (posted[1], Some(GSO)));
        }
        // Our back, their front.
        let mut peer = Peer::new("rx", "back");
        peer.command("init", &[start]);
        let mut back = BackRx::attach(peer.area.clone()).unwrap();
        for id in 0..200_u32 {
            assert_eq!(armed(back.arm(2)), 0);
            let gref = random.below(u32::MAX);
            peer.command("req", &[id, gref]);
            assert_eq!(peer.number("pushreq"), 0, "one of two");
            peer.command("req", &[id + 1, !gref]);
            assert_eq!(peer.number("pushreq"), 1);
            assert_eq!(back.available(), Ok(2));
            let request = back.take().unwrap();
            assert_eq!(request, RxRequest { id: id as u16, gref });
            assert_eq!(back.take().unwrap().gref, !gref);
            let status = if id % 2 == 0 { 1500 } else { status::DROPPED };
            back.put(RxResponse { id: request.id, offset: 11, flags: rx_flag::EXTRA_INFO, status });
            back.put_extra(HASH, false);
            assert_eq!(peer.number("finalrsp"), 0);
            back.publish();
            assert!(back.notify_needed());
            let want = [i64::from(id), 11, i64::from(rx_flag::EXTRA_INFO), i64::from(status)];
            assert_eq!(peer.command("getrsp", &[]), want);
            assert_eq!(peer.command("getrspx", &[]), words(&extra_numbers(HASH, false)));
        }
    }
}

#[test]
fn our_ctrl_halves_against_theirs() {
    for start in STARTS {
        let mut random = Random(u64::from(start));
        let mut theirs = Peer::new("ctrl", "front");
        let mut front = FrontCtrl::starting_at(theirs.area.clone(), start);
        assert_eq!(theirs.number("attach"), 128);
        let mut peer = Peer::new("ctrl", "back");
        assert_eq!(peer.command("init", &[start]), [128]);
        let mut back = BackCtrl::attach(peer.area.clone()).unwrap();
        for id in 0..300_u16 {
            let data = [0; 3].map(|_: u32| random.below(u32::MAX));
            let [a, b, c] = data;
            let question = [u32::from(id), 10, a, b, c];
            let answer = [u32::from(id), 9, b, c];
            assert_eq!(theirs.number("finalreq"), 0);
            assert!(front.put(CtrlRequest { id, kind: 10, data }));
            front.publish();
            assert!(front.notify_needed());
            assert_eq!(theirs.command("getreq", &[]), words(&question));
            assert_eq!(front.arm(), Armed::Armed);
            theirs.command("rsp", &answer);
            assert_eq!(theirs.number("pushrsp"), 1);
            let response = CtrlResponse { id, kind: 9, status: b, data: c };
            assert_eq!(front.take(), Ok(Some(response)));

            assert_eq!(armed(back.arm()), 0);
            peer.command("req", &question);
            assert_eq!(peer.number("pushreq"), 1);
            assert_eq!(back.take(), Ok(Some(CtrlRequest { id, kind: 10, data })));
            back.put(response);
            assert_eq!(peer.number("finalrsp"), 0);
            back.publish();
            assert!(back.notify_needed());
            assert_eq!(peer.command("getrsp", &[]), words(&answer));
        }
    }
}

#[test]
fn sizes_and_constants_are_those_of_the_headers() {
    let out = Command::new(program()).arg("numbers").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let mut numbers = std::collections::BTreeMap::new();
    for line in text.lines() {
        let (name, number) = line.rsplit_once(' ').unwrap();
        numbers.insert(name, number.parse::<i64>().unwrap());
    }
    let ours: &[(&str, i64)] = &[
        ("sizeof(union netif_tx_sring_entry)", TX_SLOT_LEN as i64),
        ("sizeof(union netif_rx_sring_entry)", RX_SLOT_LEN as i64),
        ("sizeof(union xen_netif_ctrl_sring_entry)", CTRL_SLOT_LEN as i64),
        ("sizeof(struct xen_netif_gref)", GREF_ENTRY_LEN as i64),
        ("offsetof(struct netif_rx_sring, pvt.netif.smartpoll_active)", 16),
        ("offsetof(struct netif_tx_sring, ring)", 64),
        ("NETTXF_csum_blank", tx_flag::CSUM_BLANK.into()),
        ("NETTXF_data_validated", tx_flag::DATA_VALIDATED.into()),
        ("NETTXF_more_data", tx_flag::MORE_DATA.into()),
        ("NETTXF_extra_info", tx_flag::EXTRA_INFO.into()),
        ("NETRXF_data_validated", rx_flag::DATA_VALIDATED.into()),
        ("NETRXF_csum_blank", rx_flag::CSUM_BLANK.into()),
        ("NETRXF_more_data", rx_flag::MORE_DATA.into()),
        ("NETRXF_extra_info", rx_flag::EXTRA_INFO.into()),
        ("NETRXF_gso_prefix", rx_flag::GSO_PREFIX.into()),
        ("NETIF_RSP_OKAY", status::OKAY.into()),
        ("NETIF_RSP_ERROR", status::ERROR.into()),
        ("NETIF_RSP_DROPPED", status::DROPPED.into()),
        ("NETIF_RSP_NULL", status::NULL.into()),
        ("XEN_NETIF_GSO_TYPE_TCPV4", gso_type::TCPV4.into()),
        ("XEN_NETIF_GSO_TYPE_TCPV6", gso_type::TCPV6.into()),
        ("XEN_NETIF_NR_SLOTS_MIN", SLOTS_PORTABLE as i64),
        ("XEN_NETIF_CTRL_TYPE_GET_HASH_FLAGS", ctrl_type::GET_HASH_FLAGS.into()),
        ("XEN_NETIF_CTRL_TYPE_SET_HASH_FLAGS", ctrl_type::SET_HASH_FLAGS.into()),
        ("XEN_NETIF_CTRL_TYPE_SET_HASH_KEY", ctrl_type::SET_HASH_KEY.into()),
        ("XEN_NETIF_CTRL_TYPE_GET_HASH_MAPPING_SIZE", ctrl_type::GET_HASH_MAPPING_SIZE.into()),
        ("XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING_SIZE", ctrl_type::SET_HASH_MAPPING_SIZE.into()),
        ("XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING", ctrl_type::SET_HASH_MAPPING.into()),
        ("XEN_NETIF_CTRL_TYPE_SET_HASH_ALGORITHM", ctrl_type::SET_HASH_ALGORITHM.into()),
        ("XEN_NETIF_CTRL_TYPE_GET_GREF_MAPPING_SIZE", ctrl_type::GET_GREF_MAPPING_SIZE.into()),
        ("XEN_NETIF_CTRL_TYPE_ADD_GREF_MAPPING", ctrl_type::ADD_GREF_MAPPING.into()),
        ("XEN_NETIF_CTRL_TYPE_DEL_GREF_MAPPING", ctrl_type::DEL_GREF_MAPPING.into()),
        ("XEN_NETIF_CTRL_STATUS_SUCCESS", ctrl_status::SUCCESS.into()),
        ("XEN_NETIF_CTRL_STATUS_NOT_SUPPORTED", ctrl_status::NOT_SUPPORTED.into()),
        ("XEN_NETIF_CTRL_STATUS_INVALID_PARAMETER", ctrl_status::INVALID_PARAMETER.into()),
        ("XEN_NETIF_CTRL_STATUS_BUFFER_OVERFLOW", ctrl_status::BUFFER_OVERFLOW.into()),
    ];
    for (name, ours) in ours {
        assert_eq!(numbers.get(name), Some(ours), "{name}");
    }
}
