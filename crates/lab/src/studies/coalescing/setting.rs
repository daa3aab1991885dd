//! What each value of the axis `setting` sets.

use super::unit;
use crate::error::Fail;
use crate::plan::Cell;
use crate::stage::{NicOptions, Proto, Stage, SwitchOptions};

/// Name of the defaults of two generators and their switch: the base of all settings.
pub const DEFAULT: &str = "default";

/// Start of the names of time-outs of a guest that never suppresses calls. Folders of earlier
/// versions have the rows' names alone.
const UNSUPPRESSED: &str = "suppress=none+";
/// A unit in folders of earlier versions, in microseconds.
const UNIT_EARLIER_US: u32 = 200;

/// Delay of an interrupt, in units of the original study.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// None.
    None,
    /// So many, after the first packet.
    Fixed(u32),
    /// So many, divided by the number of pending packets.
    Pending(u32),
}

/// A row of the original study's table of time-outs.
pub struct Timeout {
    /// Its name there.
    pub name: &'static str,
    /// Delay of a call of the guest.
    pub wait: Wait,
    /// Policy of polls for frames of the host.
    pub outside: &'static str,
}

/// The rows.
pub const TIMEOUTS: [Timeout; 6] = [
    Timeout { name: "before", wait: Wait::None, outside: "napi:1" },
    Timeout { name: "0", wait: Wait::None, outside: "event" },
    Timeout { name: "1", wait: Wait::Fixed(1), outside: "event" },
    Timeout { name: "1/pending", wait: Wait::Pending(1), outside: "event" },
    Timeout { name: "2/pending", wait: Wait::Pending(2), outside: "event" },
    Timeout { name: "5/pending", wait: Wait::Pending(5), outside: "event" },
];

/// A time-out, and the guest that it is measured with.
pub struct Timed {
    /// The time-out.
    pub timeout: &'static Timeout,
    /// Whether the guest suppresses calls while it is awake.
    pub suppresses: bool,
}

/// A setting of drivers or of the switch.
pub struct Setting {
    /// Its name in plans.
    pub name: &'static str,
    /// `--set` of both drivers.
    set: &'static [&'static str],
    /// Other options of both drivers.
    driver: &'static [&'static str],
    /// `--poll` and `--call` of the switch; empty: as by default.
    switch: [&'static str; 2],
}

const PLAIN: Setting = Setting { name: DEFAULT, set: &[], driver: &[], switch: ["", ""] };

const fn set(name: &'static str, set: &'static [&'static str]) -> Setting {
    Setting { name, set, ..PLAIN }
}

const fn driver(name: &'static str, driver: &'static [&'static str]) -> Setting {
    Setting { name, driver, ..PLAIN }
}

const fn switch(name: &'static str, switch: [&'static str; 2]) -> Setting {
    Setting { name, switch, ..PLAIN }
}

/// All of them, the default first.
pub const SETTINGS: [Setting; 28] = [
    PLAIN,
    set("tx-completion=before-tx", &["tx-completion=before-tx"]),
    set("tx-completion=timer:1000", &["tx-completion=timer:1000"]),
    set("tx-completion=on-empty", &["tx-completion=on-empty"]),
    set("tx-completion=on-half-empty", &["tx-completion=on-half-empty"]),
    set("tx-full=busy-retry", &["tx-full=busy-retry"]),
    set("tx-full=queue:1", &["tx-full=queue:1"]),
    set("tx-full=queue:256", &["tx-full=queue:256"]),
    set("rx-refill=below-half", &["rx-refill=below-half"]),
    set("rx-refill=batch:32", &["rx-refill=batch:32"]),
    set("header=apart", &["header=apart"]),
    set("header=apart+indirect=off", &["header=apart", "indirect=off"]),
    set("offset=2", &["offset=2"]),
    set("offset=6", &["offset=6"]),
    set("suppress=flags", &["suppress=flags"]),
    set("suppress=none", &["suppress=none"]),
    set("checks=off", &["checks=off"]),
    driver("in-order", &["--in-order"]),
    driver("packed", &["--packed"]),
    driver("queue-size=1024", &["--queue-size", "1024"]),
    driver("kick=adaptive", &["--kick", "adaptive"]),
    driver("kick=coalesce:50,32", &["--kick", "coalesce:50,32"]),
    driver("driver-poll=timer:1000", &["--poll", "timer:1000"]),
    switch("call=adaptive", ["", "adaptive"]),
    switch("call=coalesce:50,32", ["", "coalesce:50,32"]),
    switch("call=coalesce:50/pending", ["", "coalesce:50/pending"]),
    switch("poll=timer:1000", ["timer:1000", ""]),
    switch("poll=event", ["event", ""]),
];

/// What of these only a virtqueue has.
const VIRTIO_ALONE: [&str; 8] = [
    "header=apart",
    "suppress=flags",
    "tx-full=queue:1",
    "tx-full=queue:256",
    "indirect=off",
    "checks=off",
    "--in-order",
    "--packed",
];

impl Wait {
    /// Units that the first of so many pending packets waits.
    pub fn units(self, pending: f64) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Fixed(units) => units.into(),
            Self::Pending(units) => f64::from(units) / pending,
        }
    }
}

impl Timeout {
    /// Its value of the axis `setting`, for a guest that never suppresses calls.
    pub fn setting(&self) -> String {
        format!("{UNSUPPRESSED}{}", self.name)
    }
}

impl Timed {
    /// That of a value of the axis `setting`.
    pub fn of(setting: &str) -> Result<Self, Fail> {
        let (suppresses, row) = match setting.strip_prefix(UNSUPPRESSED) {
            Some(row) => (false, row),
            None => (true, setting),
        };
        let found = TIMEOUTS.iter().find(|timeout| timeout.name == row);
        let none = || Fail::Cell(format!("setting {setting}: there is no such time-out"));
        Ok(Self { timeout: found.ok_or_else(none)?, suppresses })
    }

    /// One unit in microseconds.
    pub fn unit_us(&self) -> u32 {
        if self.suppresses { UNIT_EARLIER_US } else { unit::us() }
    }

    /// Policy of calls of the guest.
    pub fn call(&self) -> String {
        match self.timeout.wait {
            Wait::None => "event".into(),
            Wait::Fixed(units) => format!("coalesce:{},65535", units * self.unit_us()),
            Wait::Pending(units) => format!("coalesce:{}/pending", units * self.unit_us()),
        }
    }
}

/// The value of the axis `setting` for a row of the original study among `cells`: that of the guest
/// that never suppresses calls, or that of an earlier version if there is only that.
pub fn of_row<'c>(cells: impl IntoIterator<Item = &'c Cell>, row: &str) -> String {
    let new = format!("{UNSUPPRESSED}{row}");
    let (mut has_new, mut has_earlier) = (false, false);
    for cell in cells {
        has_new |= cell.get("setting") == new;
        has_earlier |= cell.get("setting") == row;
    }
    if has_earlier && !has_new { row.into() } else { new }
}

impl Setting {
    /// That of a name.
    pub fn of(name: &str) -> Result<&'static Self, Fail> {
        let found = SETTINGS.iter().find(|setting| setting.name == name);
        found.ok_or_else(|| Fail::Cell(format!("setting {name}: there is no such setting")))
    }

    /// Whether guests that speak this have it.
    pub fn check(&self, proto: Proto) -> Result<(), Fail> {
        let alone = self.set.iter().chain(self.driver).any(|word| VIRTIO_ALONE.contains(word));
        if proto == Proto::Xen && alone {
            return Err(Fail::Missing(format!("{}: not supported by Xen rings", self.name)));
        }
        Ok(())
    }

    /// Options of both generators.
    pub fn of_drivers(&self) -> NicOptions {
        let mut options = NicOptions::new("event");
        options.set = self.set.iter().map(ToString::to_string).collect();
        for pair in self.driver.chunks(2) {
            match *pair {
                ["--kick", policy] => options.kick = policy.into(),
                ["--poll", policy] => options.poll = policy.into(),
                _ => options.more.extend(pair.iter().map(ToString::to_string)),
            }
        }
        options
    }

    /// Options of the switch.
    pub fn of_switch(&self, stage: &Stage) -> SwitchOptions {
        let [poll, call] = self.switch;
        let mut options =
            SwitchOptions::new(stage, if poll.is_empty() { "adaptive" } else { poll });
        if !call.is_empty() {
            options.call = call.into();
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_differs_from_the_default_in_one_place() {
        for setting in &SETTINGS[1..] {
            let places = [setting.set.is_empty(), setting.driver.is_empty()];
            let switch = setting.switch.iter().all(|word| word.is_empty());
            let changed = places.into_iter().chain([switch]).filter(|same| !same).count();
            assert_eq!(changed, 1, "{}", setting.name);
            assert_eq!(SETTINGS.iter().filter(|other| other.name == setting.name).count(), 1);
            assert_eq!(Setting::of(setting.name).unwrap().name, setting.name);
        }
        assert!(Setting::of("tx-completion=never").is_err());
        assert!(Timed::of("10").is_err() && Timed::of("suppress=none").is_err());
    }

    #[test]
    fn time_outs_of_earlier_folders_keep_their_guest_and_their_unit() {
        let call = |setting: &str| Timed::of(setting).unwrap().call();
        assert_eq!(call("1"), "coalesce:200,65535");
        assert_eq!(call("5/pending"), "coalesce:1000/pending");
        assert_eq!([call("before"), call("suppress=none+0")], ["event"; 2]);
        let us = unit::us();
        assert_eq!(call("suppress=none+1"), format!("coalesce:{us},65535"));
        assert_eq!(call("suppress=none+2/pending"), format!("coalesce:{}/pending", 2 * us));
        assert!(Timed::of("0").unwrap().suppresses);
        assert!(TIMEOUTS.iter().all(|row| !Timed::of(&row.setting()).unwrap().suppresses));
    }

    #[test]
    fn what_xens_rings_lack_is_not_measured_there() {
        let of = |name| Setting::of(name).unwrap();
        assert!(of("packed").check(Proto::Xen).is_err());
        assert!(of("header=apart+indirect=off").check(Proto::Xen).is_err());
        assert!(of("rx-refill=batch:32").check(Proto::Xen).is_ok());
        assert!(of("packed").check(Proto::Virtio).is_ok());
    }
}
