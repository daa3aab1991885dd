mod refused;

use super::*;
use etherparse::{
    IpHeaders, Ipv4Header, Ipv6Extensions, Ipv6Header, Ipv6RawExtHeader, PacketBuilder, TcpHeader,
};
use proptest::prelude::*;

/// A TCP or UDP frame that etherparse can build: the oracle for every header byte and checksum.
#[derive(Clone, Debug)]
struct Spec {
    v6: bool,
    udp: bool,
    tags: usize,
    /// IPv4 options, or an IPv6 destination options header: 8-byte units.
    ip_options: usize,
    /// 4-byte units.
    tcp_options: usize,
    id: u16,
    seq: u32,
    fin: bool,
    psh: bool,
    cwr: bool,
    ports: [u16; 2],
}

impl Spec {
    const TCP: Self = Self {
        v6: false,
        udp: false,
        tags: 0,
        ip_options: 0,
        tcp_options: 3,
        id: u16::MAX,
        seq: u32::MAX - 5000,
        fin: true,
        psh: true,
        cwr: true,
        ports: [1, 2],
    };

    fn l4_at(&self) -> usize {
        14 + 4 * self.tags + if self.v6 { 40 } else { 20 } + 8 * self.ip_options
    }

    fn field(&self) -> usize {
        self.l4_at() + if self.udp { 6 } else { 16 }
    }

    fn len(&self) -> usize {
        self.l4_at() + if self.udp { 8 } else { 20 + 4 * self.tcp_options }
    }

    /// The whole frame, with checksums.
    fn frame(&self, payload: &[u8]) -> Vec<u8> {
        let eth = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let id = |n: u16| n.try_into().unwrap();
        let ip = match self.tags {
            0 => eth.ip(self.ip()),
            1 => eth.single_vlan(id(5)).ip(self.ip()),
            _ => eth.double_vlan(id(5), id(6)).ip(self.ip()),
        };
        let mut out = Vec::new();
        if self.udp {
            ip.udp(self.ports[0], self.ports[1]).write(&mut out, payload).unwrap();
        } else {
            let mut tcp = TcpHeader::new(self.ports[0], self.ports[1], self.seq, 1000);
            (tcp.fin, tcp.psh, tcp.cwr, tcp.ack) = (self.fin, self.psh, self.cwr, true);
            tcp.set_options_raw(&vec![1; 4 * self.tcp_options]).unwrap();
            ip.tcp_header(tcp).write(&mut out, payload).unwrap();
            if out[self.field()..self.field() + 2] == [0, 0] {
                out[self.field()..self.field() + 2].fill(0xff);
            }
        }
        assert_eq!(out.len(), self.len() + payload.len());
        out
    }

    fn ip(&self) -> IpHeaders {
        let proto = if self.udp { 17.into() } else { 6.into() };
        if self.v6 {
            let mut extensions = Ipv6Extensions::default();
            if let Some(len) = (self.ip_options * 8).checked_sub(2) {
                let header = Ipv6RawExtHeader::new_raw(proto, &vec![0; len]).unwrap();
                extensions.destination_options = Some(header);
            }
            let header = Ipv6Header {
                source: [0x20; 16],
                destination: [0xfd; 16],
                hop_limit: 64,
                ..Default::default()
            };
            IpHeaders::Ipv6(header, extensions)
        } else {
            let mut header =
                Ipv4Header::new(0, 64, proto, [10, 1, 2, 3], [192, 168, 1, 2]).unwrap();
            header.identification = self.id;
            header.options = vec![1; 8 * self.ip_options].as_slice().try_into().unwrap();
            IpHeaders::Ipv4(header, Default::default())
        }
    }

    /// Replaces the checksum by the pseudo-header's sum, as a sender with offload does.
    fn partial(&self, mut frame: Vec<u8>) -> Vec<u8> {
        let net = 14 + 4 * self.tags;
        let addresses = if self.v6 { net + 8..net + 40 } else { net + 12..net + 20 };
        let l4_len = (frame.len() - self.l4_at()) as u16;
        let mut pseudo = frame[addresses].to_vec();
        pseudo.extend(l4_len.to_be_bytes());
        pseudo.extend([0, if self.udp { 17 } else { 6 }]);
        let field = self.field();
        frame[field..field + 2].copy_from_slice(&naive_sum(&pseudo).to_be_bytes());
        frame
    }

    fn hdr(&self, gso_size: u16) -> VnetHdr {
        let gso_type = match (gso_size, self.udp, self.v6) {
            (0, ..) => GSO_NONE,
            (_, true, _) => GSO_UDP_L4,
            (_, false, true) => GSO_TCPV6,
            (_, false, false) => GSO_TCPV4,
        };
        VnetHdr {
            flags: NEEDS_CSUM,
            gso_type: if self.cwr && !self.udp && gso_size != 0 {
                gso_type | GSO_ECN
            } else {
                gso_type
            },
            hdr_len: 7,
            gso_size,
            csum_start: self.l4_at() as u16,
            csum_offset: (self.field() - self.l4_at()) as u16,
        }
    }

    /// Expected segments, built independently.
    fn segments(&self, payload: &[u8], gso_size: usize) -> Vec<Vec<u8>> {
        let count = payload.len().div_ceil(gso_size).max(1);
        let part = |k: usize| {
            let spec = Self {
                id: self.id.wrapping_add(k as u16),
                seq: self.seq.wrapping_add((k * gso_size) as u32),
                fin: self.fin && k + 1 == count,
                psh: self.psh && k + 1 == count,
                cwr: self.cwr && k == 0,
                ..self.clone()
            };
            spec.frame(&payload[k * gso_size..payload.len().min((k + 1) * gso_size)])
        };
        (0..count).map(part).collect()
    }
}

fn spec() -> impl Strategy<Value = Spec> {
    let kind = (any::<bool>(), any::<bool>(), 0..3_usize, 0..6_usize, 0..11_usize);
    let fields = (any::<u16>(), any::<u32>(), any::<[bool; 3]>(), any::<[u16; 2]>());
    (kind, fields).prop_map(|((v6, udp, tags, opt, tcp_options), (id, seq, flags, ports))| {
        // IPv4 options are at most 40 bytes; IPv6 headers may go far beyond the private head.
        let ip_options = if v6 { [0, 1, 3, 10, 20, 40][opt] } else { opt };
        let [fin, psh, cwr] = flags;
        Spec { v6, udp, tags, ip_options, tcp_options, id, seq, fin, psh, cwr, ports }
    })
}

/// Sum of big-endian words, the reference algorithm.
fn naive_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

fn payload(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b9) >> 24) as u8).collect()
}

/// `bytes` as segments that end at `cuts`, repeated.
fn cut<'m>(bytes: &'m [u8], cuts: &[usize]) -> Vec<Seg<'m>> {
    let (mut segs, mut rest, mut i) = (Vec::new(), bytes, 0);
    while !rest.is_empty() {
        let n = if cuts.is_empty() { rest.len() } else { cuts[i % cuts.len()].min(rest.len()) };
        segs.push(Seg::of(&rest[..n]));
        rest = &rest[n..];
        i += 1;
    }
    segs
}

/// Resolves `frame`, whose first `head` bytes are private, and collects what is emitted.
fn run(
    frame: &[u8],
    head: usize,
    cuts: &[usize],
    hdr: &VnetHdr,
    to: &Offloads,
) -> Result<Vec<(Vec<u8>, VnetHdr)>, Bad> {
    let (head, body) = frame.split_at(head.min(frame.len()));
    let len = frame.len() as u32;
    let mut out = Vec::new();
    let mut scratch = Scratch::new();
    let mut emit = |head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr| {
        let mut made = head.to_vec();
        for seg in body {
            let at = made.len();
            made.resize(at + seg.len() as usize, 0);
            seg.read(&mut made[at..]);
        }
        out.push((made, *hdr));
        true
    };
    let count = resolve(head, &cut(body, cuts), len, hdr, to, &mut scratch, &mut emit)?;
    assert_eq!(count, out.len());
    if let Ok(plan) = plan(head, len, hdr, to) {
        assert!(plan.frames >= count);
        // A completed checksum, or a segment, is never longer than planned.
        assert!(out.iter().all(|(frame, _)| frame.len() <= plan.len_max as usize));
    } else {
        panic!("planned to fail, but did not");
    }
    assert!(scratch.payload.is_empty() && scratch.segs.is_empty());
    Ok(out)
}

const CSUM_ONLY: Offloads =
    Offloads { tso4: false, tso6: false, ecn: false, uso4: false, uso6: false, ..Offloads::ALL };
const NOTHING: Offloads = Offloads { csum: false, ..CSUM_ONLY };

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1..10_usize, 1..5000_usize], 0..6)
}

proptest! {
    #[test]
    fn a_partial_checksum_is_completed(
        spec in spec(), len in 0..5000_usize, seed: u32, cuts in cuts(), head in 64..=128_usize
    ) {
        let want = spec.frame(&payload(len, seed));
        let frame = spec.partial(want.clone());
        let made = run(&frame, head, &cuts, &spec.hdr(0), &NOTHING).unwrap();
        prop_assert_eq!(made, vec![(want, VnetHdr::NONE)]);
    }

    #[test]
    fn a_partial_checksum_passes_unchanged_over_the_accepted_ip_version(
        spec in spec(), len in 0..3000_usize, seed: u32, cuts in cuts(), head in 64..=128_usize
    ) {
        let whole = spec.frame(&payload(len, seed));
        let partial = spec.partial(whole.clone());
        let to = Offloads { csum_v4_only: true, ..Offloads::ALL };
        let (hdr, gso) = (spec.hdr(0), spec.hdr(1448));
        let made = run(&partial, head, &cuts, &hdr, &to).unwrap();
        let want = if spec.v6 { (whole, VnetHdr::NONE) } else { (partial.clone(), hdr) };
        prop_assert_eq!(made, vec![want]);
        prop_assert_eq!(needs_work(&partial[..head.min(partial.len())], &gso, &to), spec.v6);
        let made = run(&partial, head, &cuts, &gso, &to).unwrap();
        let plain = run(&partial, head, &cuts, &gso, &NOTHING).unwrap();
        prop_assert_eq!(made, if spec.v6 { plain } else { vec![(partial, gso)] });
    }

    #[test]
    fn a_missing_partial_checksum_is_stored(
        spec in spec(), len in 0..5000_usize, seed: u32, head in 0..=128_usize
    ) {
        let frame = spec.frame(&payload(len, seed));
        let head = head.min(frame.len());
        let mut private = frame[..head].to_vec();
        let put = put_partial(&mut private, frame.len() as u32);
        prop_assert_eq!(put, spec.field() + 2 <= head);
        let want = if put { spec.partial(frame) } else { frame };
        prop_assert_eq!(&private, &want[..head]);
    }

    #[test]
    fn segments_equal_those_of_an_independent_builder(
        spec in spec(), len in prop_oneof![0..6000_usize, 60_000..64_500_usize], seed: u32,
        gso_size in prop_oneof![Just(1_usize), 1..100_usize, 500..3000_usize, Just(65_535)],
        cuts in cuts(), head in 64..=128_usize, csum: bool
    ) {
        let data = payload(len, seed);
        let frame = spec.partial(spec.frame(&data));
        let hdr = spec.hdr(gso_size as u16);
        let to = if csum { CSUM_ONLY } else { NOTHING };
        prop_assert!(needs_work(&frame[..head.min(frame.len())], &hdr, &to));
        let made = run(&frame, head, &cuts, &hdr, &to);
        if len.div_ceil(gso_size) > SEGMENTS_MAX {
            prop_assert_eq!(made, Err(Bad::TooManySegments));
            return Ok(());
        }
        let made = made.unwrap();
        let want = spec.segments(&data, gso_size);
        prop_assert_eq!(made.len(), want.len());
        prop_assert_eq!(made.len(), segments(&hdr, frame.len() as u32, spec.len()));
        for ((made, got), want) in made.into_iter().zip(want) {
            if csum {
                let partial = VnetHdr { gso_type: 0, gso_size: 0, hdr_len: 0, ..hdr };
                prop_assert_eq!(got, partial);
                prop_assert_eq!(got.check(made.len() as u32, to), Ok(got));
                prop_assert_eq!(made, spec.partial(want));
            } else {
                prop_assert_eq!(got, VnetHdr::NONE);
                prop_assert_eq!(made, want);
            }
        }
    }

    #[test]
    fn any_bytes_are_tolerated(
        spec in spec(), len in 0..700_usize,
        noise in prop::collection::vec((0..300_usize, any::<u8>()), 0..8),
        cut_at in 0..900_usize, hdr: [u8; 10], sane_hdr: bool, gso_size in 0..600_u16,
        head in 0..=200_usize, cuts in cuts(), to: [bool; 7]
    ) {
        let mut frame = spec.frame(&payload(len, 0));
        for (at, byte) in noise {
            if let Some(b) = frame.get_mut(at) { *b = byte; }
        }
        frame.truncate(cut_at);
        let hdr = if sane_hdr { spec.hdr(gso_size) } else { VnetHdr::parse(&hdr) };
        let [csum, csum_v4_only, tso4, tso6, ecn, uso4, uso6] = to;
        let to = Offloads { csum, csum_v4_only, tso4, tso6, ecn, uso4, uso6 };
        let head_len = head.min(frame.len());
        needs_work(&frame[..head_len], &hdr, &to);
        put_partial(&mut frame[..head_len].to_vec(), frame.len() as u32);
        // Unchecked headers too: safety here must not depend on `VnetHdr::check`.
        if let Ok(made) = run(&frame, head, &cuts, &hdr, &to) {
            let addresses = |f: &[u8]| f.iter().take(12).copied().collect::<Vec<u8>>();
            prop_assert!(made.iter().all(|(f, _)| addresses(f) == addresses(&frame)));
        }
    }

    #[test]
    fn sums_equal_the_reference_algorithm(
        bytes in prop::collection::vec(any::<u8>(), 0..700), cuts in cuts(), chunk in 1..70_usize
    ) {
        let want = naive_sum(&bytes);
        let mut sum = Sum::default();
        sum.add_segs(&cut(&bytes, &cuts), &mut vec![0; chunk]);
        prop_assert_eq!(u16::from_be_bytes(sum.fold()), want);
        let mut sum = Sum::default();
        sum.add(&bytes);
        prop_assert_eq!(u16::from_be_bytes(sum.fold()), want);
        prop_assert_eq!(sum.finish_zero(), (!want).to_be_bytes());
    }
}

#[test]
fn sums_of_the_largest_bytes_do_not_overflow() {
    for len in [0, 1, 2, 31, 32, 33, 65_550, 200_001] {
        let mut sum = Sum::default();
        let bytes = vec![0xff; len];
        (0..9).for_each(|_| sum.add(&bytes));
        assert_eq!(u16::from_be_bytes(sum.fold()), naive_sum(&vec![0xff; 9 * len]), "{len}");
    }
}

#[test]
fn a_checksum_is_never_zero_on_the_wire() {
    let mut sum = Sum::default();
    sum.add(&[0xff, 0xff]);
    assert_eq!((sum.finish_zero(), sum.finish()), ([0, 0], [0xff, 0xff]));
}

#[test]
fn work_is_needed_only_for_missing_offloads() {
    let tcp = Spec::TCP.frame(&[0; 3000]);
    let hdr = VnetHdr { gso_type: GSO_TCPV4, ..Spec::TCP.hdr(1448) };
    assert!(!needs_work(&tcp, &VnetHdr::NONE, &NOTHING));
    assert!(!needs_work(&tcp, &hdr, &Offloads { tso4: true, ..CSUM_ONLY }));
    assert!(needs_work(&tcp, &hdr, &Offloads { tso6: true, ..CSUM_ONLY }));
    let ecn = VnetHdr { gso_type: GSO_TCPV4 | GSO_ECN, ..hdr };
    assert!(needs_work(&tcp, &ecn, &Offloads { ecn: false, ..Offloads::ALL }));
    assert!(!needs_work(&tcp, &ecn, &Offloads::ALL));
    let verified = VnetHdr { flags: crate::vnet::DATA_VALID, ..VnetHdr::NONE };
    assert!(needs_work(&tcp, &verified, &NOTHING) && !needs_work(&tcp, &verified, &CSUM_ONLY));
    for v6 in [false, true] {
        let udp = Spec { udp: true, v6, tags: 1, ..Spec::TCP };
        let (frame, hdr) = (udp.frame(&[0; 3000]), udp.hdr(1000));
        assert_eq!(needs_work(&frame, &hdr, &Offloads { uso4: true, ..CSUM_ONLY }), v6);
        assert_eq!(needs_work(&frame, &hdr, &Offloads { uso6: true, ..CSUM_ONLY }), !v6);
    }
}

#[test]
fn data_valid_is_cleared_if_not_negotiated() {
    let frame = Spec::TCP.frame(&[1; 500]);
    let hdr = VnetHdr { flags: crate::vnet::DATA_VALID, ..VnetHdr::NONE };
    let made = run(&frame, 128, &[100], &hdr, &NOTHING).unwrap();
    assert_eq!(made, vec![(frame.clone(), VnetHdr::NONE)]);
    let made = run(&frame, 128, &[100], &hdr, &CSUM_ONLY).unwrap();
    assert_eq!(made, vec![(frame, hdr)]);
}

#[test]
fn gso_without_payload_is_one_frame() {
    let frame = Spec::TCP.partial(Spec::TCP.frame(&[]));
    let made = run(&frame, 128, &[], &Spec::TCP.hdr(1000), &NOTHING).unwrap();
    assert_eq!(made, vec![(Spec::TCP.frame(&[]), VnetHdr::NONE)]);
}

#[test]
fn a_full_destination_stops_the_segments() {
    let frame = Spec::TCP.partial(Spec::TCP.frame(&[7; 5000]));
    let mut scratch = Scratch::new();
    let mut left = 3;
    let mut emit = |_: &[u8], _: &[Seg<'_>], _: &VnetHdr| {
        left -= 1;
        left >= 0
    };
    let (head, body) = frame.split_at(128);
    let hdr = Spec::TCP.hdr(1000);
    let len = frame.len() as u32;
    let body = [Seg::of(body)];
    let made = resolve(head, &body, len, &hdr, &NOTHING, &mut scratch, &mut emit);
    assert_eq!(made, Ok(3));
    assert_eq!(plan(head, len, &hdr, &NOTHING), Ok(Plan { frames: 5, len_max: 1066 }));
}

#[test]
fn checksums_beyond_the_private_head_are_stored_within_bounds() {
    let far = |ip_options| Spec { v6: true, ip_options, ..Spec::TCP };
    let result = |spec: &Spec| {
        let frame = spec.partial(spec.frame(&payload(900, 3)));
        run(&frame, 128, &[33], &spec.hdr(0), &NOTHING)
    };
    let reachable = far(40);
    assert!(reachable.field() > 128);
    let want = reachable.frame(&payload(900, 3));
    assert_eq!(result(&reachable), Ok(vec![(want, VnetHdr::NONE)]));
    assert_eq!(result(&far(60)), Err(Bad::Checksum));
}

#[test]
fn a_checksum_never_overwrites_a_parsed_field() {
    let frame = Spec { tags: 1, ..Spec::TCP }.frame(&[1; 100]);
    let at = |start: u16, offset: u16| {
        let hdr =
            VnetHdr { flags: NEEDS_CSUM, csum_start: start, csum_offset: offset, ..VnetHdr::NONE };
        run(&frame, 128, &[], &hdr, &NOTHING).map(|made| made.len())
    };
    let l4 = 38;
    for field in 0..l4 + 4 {
        assert_eq!(at(0, field), Err(Bad::Checksum), "{field}");
        assert_eq!(at(field, 0), Err(Bad::Checksum), "{field}");
    }
    assert_eq!(at(l4, 4), Ok(1));
    assert_eq!(at(0, frame.len() as u16 - 2), Ok(1), "beyond the private head");
    assert_eq!(at(l4, frame.len() as u16 - 1 - l4), Err(Bad::Checksum), "outside");
    // Not IP: only MACs, tags and type were parsed.
    let other = [&frame[..16], &[0x88, 0xb5], &frame[18..]].concat();
    let hdr = VnetHdr { flags: NEEDS_CSUM, csum_start: 18, csum_offset: 0, ..VnetHdr::NONE };
    assert!(run(&other, 128, &[], &hdr, &NOTHING).is_ok());
    let hdr = VnetHdr { csum_start: 17, ..hdr };
    assert_eq!(run(&other, 128, &[], &hdr, &NOTHING), Err(Bad::Checksum));
}

#[test]
fn lengths_that_differ_are_refused() {
    let frame = Spec::TCP.frame(&[1; 100]);
    let mut scratch = Scratch::new();
    let mut emit = |_: &[u8], _: &[Seg<'_>], _: &VnetHdr| true;
    let result = resolve(&frame, &[], 99, &VnetHdr::NONE, &NOTHING, &mut scratch, &mut emit);
    assert_eq!(result, Err(Bad::Length));
}
