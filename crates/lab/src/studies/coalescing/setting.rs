//! What each value of the axis `setting` sets.

use crate::error::Fail;
use crate::stage::{NicOptions, Proto, Stage, SwitchOptions};

/// Name of the defaults of two generators and their switch: the base of all settings.
pub const DEFAULT: &str = "default";

/// A row of the original study's table of time-outs.
pub struct Timeout {
    /// Its name there.
    pub name: &'static str,
    /// Policy of calls of the guest.
    pub call: &'static str,
    /// Policy of polls for frames of the host.
    pub outside: &'static str,
}

/// The rows. One unit of the original study is 200 us here; the report says why.
pub const TIMEOUTS: [Timeout; 6] = [
    Timeout { name: "before", call: "event", outside: "napi:1" },
    Timeout { name: "0", call: "event", outside: "event" },
    Timeout { name: "1", call: "coalesce:200,65535", outside: "event" },
    Timeout { name: "1/pending", call: "coalesce:200/pending", outside: "event" },
    Timeout { name: "2/pending", call: "coalesce:400/pending", outside: "event" },
    Timeout { name: "5/pending", call: "coalesce:1000/pending", outside: "event" },
];

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
pub const SETTINGS: [Setting; 25] = [
    PLAIN,
    set("tx-completion=before-tx", &["tx-completion=before-tx"]),
    set("tx-completion=timer:1000", &["tx-completion=timer:1000"]),
    set("tx-completion=on-empty", &["tx-completion=on-empty"]),
    set("tx-completion=on-half-empty", &["tx-completion=on-half-empty"]),
    set("tx-full=busy-retry", &["tx-full=busy-retry"]),
    set("rx-refill=below-half", &["rx-refill=below-half"]),
    set("rx-refill=batch:32", &["rx-refill=batch:32"]),
    set("header=apart", &["header=apart"]),
    set("header=apart+indirect=off", &["header=apart", "indirect=off"]),
    set("offset=2", &["offset=2"]),
    set("offset=6", &["offset=6"]),
    set("suppress=flags", &["suppress=flags"]),
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
const VIRTIO_ALONE: [&str; 6] =
    ["header=apart", "suppress=flags", "indirect=off", "checks=off", "--in-order", "--packed"];

impl Timeout {
    /// That of a name.
    pub fn of(name: &str) -> Result<&'static Self, Fail> {
        let found = TIMEOUTS.iter().find(|timeout| timeout.name == name);
        found.ok_or_else(|| Fail::Cell(format!("setting {name}: there is no such time-out")))
    }
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
        assert!(Timeout::of("10").is_err());
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
