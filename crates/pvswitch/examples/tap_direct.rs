//! Nanoseconds per frame from a TAP into a guest's buffers, read directly and read privately,
//! alternately: `sudo target/release/examples/tap_direct`. One thread; the guest only returns
//! buffers.

use std::time::Instant;

use switch::forward::Mode;
use tap_guest::{KIND, Kind, World, plain, tso};
use uplink::Batching;

#[path = "../tests/common/tap_guest.rs"]
mod tap_guest;

/// The room of the smallest ring below: further frames are read privately.
const FRAMES: u32 = 5;
const ROUNDS: usize = 3000;

/// One round: fills the TAP's queue, then reads all frames.
fn drain(world: &mut World, frames: &[(switch::vnet::VnetHdr, Vec<u8>)], direct: bool) -> u64 {
    world.send(frames);
    let before = world.seen.frames.get();
    let start = Instant::now();
    while world.seen.frames.get() - before < frames.len() as u64 {
        world.round(direct);
        world.guest.recycle();
    }
    u64::try_from(start.elapsed().as_nanos()).unwrap() / frames.len() as u64
}

fn main() {
    println!(
        "frame  guest's buffers     private ns (quartiles)      direct ns (quartiles)  direct"
    );
    let long: &[u32] = &[69_632];
    for (len, gso) in [(64, false), (1514, false), (9014, false), (16_000, true), (65_500, true)] {
        for (chain, mergeable) in [(&[1536][..], true), (&[4096], true), (long, true)] {
            let kind = Kind { chain, mergeable, ..KIND };
            let Some(mut world) = World::new(kind, Mode::Cross, Batching::Auto) else { return };
            world.guest.post(usize::MAX);
            let make = if gso { tso } else { plain };
            let frames: Vec<_> = (0..FRAMES).map(|n| make(len, n)).collect();
            let mut ns = [Vec::new(), Vec::new()];
            for round in 0..ROUNDS {
                for direct in [round % 2 == 0, round % 2 != 0] {
                    ns[usize::from(direct)].push(drain(&mut world, &frames, direct));
                }
            }
            let [private, direct] = ns.map(|mut ns| {
                ns.sort_unstable();
                let at = |part: usize| ns[(ns.len() - 1) * part / 4];
                format!("{:7} ({} to {})", at(2), at(1), at(3))
            });
            let share = world.seen.direct.get() * 200 / world.seen.frames.get();
            println!("{len:5}  {chain:?} {private:>26} {direct:>26}  {share}%");
        }
    }
}
