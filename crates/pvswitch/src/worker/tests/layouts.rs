//! Where the memory is that several workers use: what one of them writes is in no cache line with
//! what another one uses. `cargo test -p pvswitch layouts -- --nocapture` prints the list.

use std::mem::{align_of, size_of};

use shm::sync::Mutex;
use switch::forward::{EgressQueue, Port};
use switch::stats::{EgressStats, IngressStats};
use switch::tuning::Tuning;
use vhost_user::port::{VirtioEgress, VirtioIngress};

use crate::worker::Handle;

/// Two cache lines, of which some processors fetch the second with the first.
const APART: usize = 128;

/// An object that lies in memory by itself, or beside others of its kind.
struct Object {
    name: &'static str,
    size: usize,
    align: usize,
    /// Who writes it, and who reads it then.
    used: &'static str,
}

fn object<T>(name: &'static str, used: &'static str) -> Object {
    Object { name, size: size_of::<T>(), align: align_of::<T>(), used }
}

#[test]
fn what_workers_write_is_apart() {
    let apart = [
        object::<IngressStats>("IngressStats", "its queue's worker; ctl reads"),
        object::<EgressStats>("EgressStats", "the worker that delivers, under the queue's lock"),
        object::<EgressQueue>("EgressQueue", "workers that deliver, when it is full; all read"),
        object::<Tuning>("Tuning", "its queue's worker when its state changes; ctl"),
        object::<Handle>("Handle", "its worker, once a round; commands of others"),
    ];
    // One allocation for each; within it, all is of whoever holds the lock.
    let locked = [
        object::<Mutex<VirtioIngress>>("Mutex<VirtioIngress>", "its queue's worker"),
        object::<Mutex<VirtioEgress>>("Mutex<VirtioEgress>", "the worker that delivers"),
    ];
    // Written by the control thread only: counts of epochs, settings, states.
    let read = [object::<Port>("Port", "all workers read; its queues' list is elsewhere")];
    println!("{:22} bytes align  written by", "object");
    for Object { name, size, align, used } in apart.iter().chain(&locked).chain(&read) {
        println!("{name:22} {size:5} {align:5}  {used}");
    }
    for Object { name, size, align, .. } in apart {
        assert!(
            align >= APART && size.is_multiple_of(APART),
            "{name}: {size} bytes, align {align}"
        );
    }
    for Object { name, size, .. } in locked {
        assert!(size >= APART, "{name}: {size} bytes: shares its lines with other allocations");
    }
}
