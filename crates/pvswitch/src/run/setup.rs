//! Process-wide preparations before a run.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::sync::Arc;

use ::os::{Priority, Sandbox};
use shm::sync::{Lock, Mutex};
use switch::account::Budgets;
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Port};
use switch::poll::Policy;
use switch::stats::EgressStats;

use super::restore::Start;
use super::takeover::Takeover;
use super::{Attach, Event, Options, PortState, RunError, System, os};
use crate::demo::format::plural;
use crate::pool::PoolError;
use crate::spec::PortSpec;

/// Raises the limit on descriptors to its maximum: ports and front-ends need many. If the system
/// refuses, an error follows when they run out.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Prepares the process to survive a peer that truncates its memory. Where that fails, memory of
/// peers is refused; ports of other kinds work.
pub(super) fn guard_memory() {
    if let Err(error) = shm::prepare() {
        tracing::warn!("{error}");
    }
}

/// Limits the allocator's heaps to one for each CPU and one more: threads that close what peers
/// sent are many, allocate little, and would keep a heap each.
fn limit_heaps() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    ::os::limit_heaps(cpus + 1);
}

/// Starts the process that starts programs for this one, and has threads confined.
fn confine(options: &Options) -> Result<(), RunError> {
    super::helper::start()?;
    ::os::enable_confinement(options.sandbox).map_err(PoolError::from)?;
    match options.sandbox {
        Sandbox::On => {}
        Sandbox::Seccomp => {
            tracing::warn!("--sandbox seccomp: files are protected by their permissions alone");
        }
        Sandbox::Off => {
            tracing::warn!("--sandbox off: threads that serve peers may make any system call");
        }
    }
    vhost_user::foreign::start().map_err(os("closer thread"))
}

/// Confines this thread, whose ports are started. Nothing was changed by an error.
pub(super) fn confine_control() -> Result<(), RunError> {
    Ok(::os::confine(::os::ThreadKind::Control).map_err(PoolError::from)?)
}

/// Starts threads and sockets of the switch itself.
pub(super) fn start(options: Options, start: &mut Start) -> Result<System, RunError> {
    raise_descriptor_limit();
    guard_memory();
    limit_heaps();
    confine(&options)?;
    let takeover = start.takeover.as_mut();
    let mut inherited = takeover.map(Takeover::take_inherited).transpose()?.unwrap_or_default();
    inherited.activated.append(&mut start.activated);
    let signals = crate::signals::readable().map_err(os("signal pipe"))?;
    let mut system = System::new(options, inherited, start.keep.take())?;
    system.watch(signals.as_fd(), Event::Signal)?;
    system.watch(system.hangups.try_clone().map_err(os("signal pipe"))?.as_fd(), Event::Hangup)?;
    system.signals = Some(signals);
    system.end_on_panic(start.live_before.take());
    Ok(system)
}

impl System {
    /// Starts the ports of the configuration. One whose interface does not exist is down until it
    /// does, and all others are served.
    pub(super) fn start_ports(&mut self) -> Result<(), RunError> {
        for text in self.config.ports.clone() {
            self.start_port(&PortSpec::from(&text))?;
        }
        self.add_statics()
    }

    pub(super) fn start_port(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        match self.add_port(spec) {
            Err(error) if let Some(missing) = error.missing_interface() => {
                let prepared = self.await_interface(spec, self.free_id()?, missing);
                self.install(vec![prepared]);
                Ok(())
            }
            result => result,
        }
    }

    pub(super) fn add_statics(&mut self) -> Result<(), RunError> {
        for entry in self.config.statics.clone() {
            let id = self.port(&entry.port)?.port.id;
            let added = self.fdb.add_static(entry.address.mac, entry.address.vlan, id, 0);
            added.map_err(|error| RunError::Request(error.to_string()))?;
        }
        Ok(())
    }

    /// Warns where workers at real-time priority leave too little to ordinary processes.
    pub(super) fn warn_of_priority(&self) {
        let Options { priority, cpus, .. } = &self.options;
        let available = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let mut queues = self.ports.values().flat_map(|state| &state.ingress);
        let spins = self.options.policy == Policy::Spin
            || queues.any(|queue| queue.tuning.poll() == Policy::Spin);
        let workers = self.pool.workers().len();
        if let Some(warning) = priority_warning(*priority, workers, cpus, available, spins) {
            tracing::warn!("{warning}");
        }
    }
}

/// What workers at real-time priority take from ordinary processes (docs/design/0033). `cpus`: to
/// which workers are pinned; `available`: number of CPUs of this process before that.
fn priority_warning(
    priority: Priority,
    workers: usize,
    cpus: &[usize],
    available: usize,
    spins: bool,
) -> Option<String> {
    let pinned: BTreeSet<_> = cpus.iter().take(workers).collect();
    let used = if cpus.is_empty() { workers } else { pinned.len() };
    if priority != Priority::Realtime || used < available && !spins {
        return None;
    }
    let (when, remedy) = match spins {
        true => ("always: poll=spin never sleeps for lack of work", "another poll policy, or "),
        false => ("while they have work", ""),
    };
    Some(format!(
        "--priority realtime: {} on {} leave ordinary processes, guests' virtual CPUs included, a \
         sixteenth of the CPUs that they run on, {when}: use {remedy}fewer --workers than CPUs",
        plural(workers as u64, "worker"),
        plural(available as u64, "CPU"),
    ))
}

/// Mappings and descriptors reserved for the process itself; at most half of what there is.
const OWN_MAPPINGS: u64 = 4096;
const OWN_DESCRIPTORS: u64 = 256;
/// Default of `vm.max_map_count`.
const MAPPINGS: u64 = 65_530;

/// Limits of the process. `None`: unlimited.
#[derive(Clone, Copy)]
struct Limits {
    /// Bytes that the processor can address for a process (47 bits on most).
    addressable: u64,
    /// RLIMIT_AS, in bytes.
    address_space: Option<u64>,
    /// `vm.max_map_count`.
    mappings: u64,
    /// RLIMIT_NOFILE.
    descriptors: Option<u64>,
}

impl Limits {
    fn of_this_process() -> Self {
        use rustix::process::{Resource, getrlimit};
        let mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        // The stack, and so this variable, is at the upper end of the address space.
        let on_stack = std::process::id();
        Self {
            addressable: (std::ptr::from_ref(&on_stack).addr() as u64).next_power_of_two(),
            address_space: getrlimit(Resource::As).current,
            mappings: mappings.and_then(|n| n.trim().parse().ok()).unwrap_or(MAPPINGS),
            descriptors: getrlimit(Resource::Nofile).current,
        }
    }

    /// Budgets for all ports: bytes mapped, mappings, descriptors.
    fn for_ports(self) -> [u64; 3] {
        let space = self.address_space.unwrap_or(u64::MAX).min(self.addressable);
        let less = |all: u64, own: u64| all - own.min(all / 2);
        [
            // The rest is for the program, its threads, its own memory and gaps.
            space / 4 * 3,
            less(self.mappings, OWN_MAPPINGS),
            less(self.descriptors.unwrap_or(u64::MAX), OWN_DESCRIPTORS),
        ]
    }
}

/// Budgets of all ports together, from the limits of the process.
pub(super) fn budgets() -> Budgets {
    let [mapped_bytes, mappings, descriptors] = Limits::of_this_process().for_ports();
    Budgets::new(mapped_bytes, mappings, descriptors)
}

/// Random keys that no guest can predict.
pub(super) fn random_key() -> Result<[u64; 3], RunError> {
    let mut bytes = [0_u8; 24];
    let file = std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut bytes));
    file.map_err(os("/dev/urandom"))?;
    let word = |i: usize| u64::from_ne_bytes(std::array::from_fn(|b| bytes[i * 8 + b]));
    Ok([word(0), word(1), word(2)])
}

/// Creates a port that accepts and drops all frames.
pub(super) fn add_null(spec: &PortSpec, id: PortId) -> PortState {
    let stats = Arc::new(EgressStats::default());
    let queue = Arc::new(Mutex::new(Lock::Egress, uplink::NullEgress::new(Arc::clone(&stats))));
    let port = Port::new(id, spec.name.clone(), vec![EgressQueue::new(queue, stats)]);
    port.set_active(1);
    PortState::new(spec, Arc::new(port), Vec::new(), Attach::Null)
}

#[cfg(test)]
mod tests {
    use super::*;
    use switch::account::defaults;

    const USUAL: Limits = Limits {
        addressable: 1 << 47,
        address_space: None,
        mappings: MAPPINGS,
        descriptors: Some(524_288),
    };

    #[test]
    fn budgets_leave_the_process_what_it_needs_for_itself() {
        assert_eq!(USUAL.for_ports(), [96 << 40, 61_434, 524_032]);
        let unlimited = Limits { descriptors: None, mappings: u64::MAX, ..USUAL };
        assert_eq!(unlimited.for_ports()[1..], [u64::MAX - 4096, u64::MAX - 256]);
        let limited = Limits { address_space: Some(8 << 30), ..USUAL };
        assert_eq!(limited.for_ports()[0], 6 << 30);
        // 39 bits: small systems of ARM.
        let small = Limits { addressable: 1 << 39, address_space: Some(1 << 46), ..USUAL };
        assert_eq!(small.for_ports()[0], 384 << 30);
        let few = Limits { mappings: 1000, descriptors: Some(64), ..USUAL };
        assert_eq!(few.for_ports()[1..], [500, 32]);
        let none = Limits { address_space: Some(0), mappings: 0, descriptors: Some(0), ..USUAL };
        assert_eq!(none.for_ports(), [0, 0, 0]);
    }

    #[test]
    fn realtime_workers_on_all_cpus_or_without_sleep_are_warned_of() {
        let warning = |workers, cpus: &[usize], spins| {
            priority_warning(Priority::Realtime, workers, cpus, 4, spins)
        };
        let all = warning(4, &[], false).unwrap();
        assert!(all.contains("4 workers on 4 CPUs leave") && all.contains("fewer --workers"));
        assert!(warning(5, &[0, 1, 2, 3], false).is_some());
        assert_eq!(warning(3, &[], false), None);
        assert_eq!(warning(8, &[0, 1], false), None, "two CPUs are free of them");
        let spins = warning(1, &[], true).unwrap();
        assert!(spins.contains("1 worker on 4 CPUs") && spins.contains("another poll policy"));
        for priority in [Priority::Normal, Priority::High] {
            assert_eq!(priority_warning(priority, 4, &[], 4, true), None);
        }
    }

    #[test]
    fn limits_of_this_process_suffice_for_guests() {
        let limits = Limits::of_this_process();
        assert!((32..=57).contains(&limits.addressable.trailing_zeros()), "{}", limits.addressable);
        let [bytes, mappings, descriptors] = limits.for_ports();
        assert!(bytes > 0 && mappings > 0 && descriptors > 0);
    }

    /// Issue 14, rows 1 and 7: what one port may hold is far from what all may.
    #[test]
    fn no_single_port_reaches_the_budget_of_all() {
        let [bytes, mappings, _] = USUAL.for_ports();
        assert!(defaults::MAPPED_BYTES * 16 < bytes && defaults::MAPPINGS * 32 < mappings);
    }
}
