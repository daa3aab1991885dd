use std::path::Path;

use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};

use super::*;
use crate::file::File;
use crate::port::Given;
use crate::schema::port::KINDS;
use crate::schema::{self, Entry, Type, policy, run};

fn config(text: &str) -> Config {
    File::parse(Path::new("x.toml"), text).unwrap().config
}

/// Any valid value of a type, as text of the command line.
fn text_of(value: Type) -> BoxedStrategy<String> {
    match value {
        Type::Number(min, max) => (min..=max).prop_map(|n| n.to_string()).boxed(),
        Type::Bytes(max) => (0..=max, 0..4_u32)
            .prop_map(|(n, unit)| if unit == 0 { n } else { n >> (10 * unit) << (10 * unit) })
            .prop_map(|n| n.to_string())
            .boxed(),
        Type::Choice(words) => select(words)
            .prop_map(|choice| match choice.number {
                None => choice.word.into(),
                Some((_, _, max)) => format!("{}:{max}", choice.word),
            })
            .boxed(),
        Type::Policy => select(&policy::FORMS[..])
            .prop_map(|form| match form.args {
                policy::Args::None => form.word.into(),
                policy::Args::Maybe(n) => format!("{}:{}", form.word, n.max),
                policy::Args::Two(a, b) => format!("{}:{},{}", form.word, a.max, b.min),
                policy::Args::Pending(n) => format!("{}:{}/pending", form.word, n.min),
            })
            .boxed(),
        Type::Mode => (0..0o200_u64).prop_map(|n| format!("{:04o}", 0o600 | n)).boxed(),
        Type::Macs => prop::collection::vec(any::<[u8; 6]>(), 0..3)
            .prop_map(|mut macs| {
                // Unicast, and never zero.
                macs.iter_mut().for_each(|mac| mac[0] = mac[0] & 0xfc | 2);
                macs.sort_unstable();
                macs.dedup();
                Value::Macs(macs).to_string()
            })
            .boxed(),
        Type::Ips => {
            let list = vec!["none", "locked", "10.0.0.1", "fd00::1", "10.0.0.1+fd00::1+10.0.0.2"];
            select(list).prop_map(Into::into).boxed()
        }
        Type::Vlan => select(vec!["none", "1", "4094"]).prop_map(Into::into).boxed(),
        Type::Vlans => select(vec!["none", "7", "5+10-20"]).prop_map(Into::into).boxed(),
        Type::Rate => {
            select(vec!["none", "1Gbit", "2frames", "64kbit+1kframes"]).prop_map(Into::into).boxed()
        }
        Type::Burst => {
            select(vec!["none", "64K", "2frames", "1M+1kframes"]).prop_map(Into::into).boxed()
        }
        Type::Names(names) => {
            subsequence(names, 1..=names.len()).prop_map(|names| names.join("+")).boxed()
        }
        Type::Cpus => prop::collection::vec(0..1024_usize, 0..4)
            .prop_map(|cpus| Value::Cpus(cpus).to_string())
            .boxed(),
        Type::Seconds => (0..1_000_000_u32).prop_map(|s| s.to_string()).boxed(),
        Type::Address => {
            select(vec!["127.0.0.1:9000", "[::1]:80", "unix:/run/x y"]).prop_map(Into::into).boxed()
        }
        // With quotes, backslashes and letters of several bytes.
        Type::Text(_) => "[ -~é–]{1,20}".boxed(),
        Type::Table(_) | Type::Flag => Just(String::new()).boxed(),
    }
}

fn option_of(kind: Kind) -> impl Strategy<Value = Given> {
    let options: Vec<_> = kind.options().collect();
    (select(options), prop::option::of(0..4_usize)).prop_flat_map(move |(entry, queue)| {
        let queue = queue.filter(|_| entry.per_queue);
        text_of(entry.value).prop_map(move |text| {
            let value = entry.parse(&text).unwrap();
            Given { entry, queue, value }
        })
    })
}

fn port() -> impl Strategy<Value = PortText> {
    let kind = select(&KINDS[..]);
    kind.prop_flat_map(|kind| {
        let arg = match kind.kind {
            Kind::VhostUser | Kind::Stream | Kind::Dgram | Kind::XenLocal => "/[ -~é]{1,40}",
            Kind::Tap | Kind::AfPacket | Kind::AfXdp => "[!-~]{1,15}",
            Kind::Xen => "(auto|[0-9]{1,4}/[0-9]{1,4})",
            Kind::Passt | Kind::Null => "",
        };
        let options = prop::collection::vec(option_of(kind.kind), 0..8);
        ("[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,14}", arg, options)
            .prop_map(move |(name, arg, options)| PortText { name, kind: kind.kind, arg, options })
    })
    .prop_filter("queues exist", |port| port.check().is_ok())
}

fn settings() -> impl Strategy<Value = Settings> {
    let skipped = ["include", "static", "port"];
    let of_file = |e: &&Entry| e.given != schema::Given::CommandLine;
    let all: Vec<_> =
        run::TABLE.iter().filter(of_file).filter(|e| !skipped.contains(&e.name)).collect();
    let len = all.len();
    subsequence(all, 0..=len)
        .prop_flat_map(|entries| {
            entries
                .into_iter()
                .map(|entry| {
                    text_of(entry.value).prop_map(move |text| (entry, entry.parse(&text).unwrap()))
                })
                .collect::<Vec<_>>()
        })
        .prop_map(|values| {
            let mut settings = Settings::default();
            values.into_iter().for_each(|(entry, value)| settings.set(entry, value));
            settings
        })
}

fn any_config() -> impl Strategy<Value = Config> {
    let statics = prop::collection::btree_map((any::<[u8; 6]>(), 0..4095_u16), 0..4_usize, 0..4);
    (settings(), prop::collection::vec(port(), 1..6), statics).prop_map(
        |(settings, mut ports, statics)| {
            ports.sort_by(|a, b| a.name.cmp(&b.name));
            ports.dedup_by(|a, b| a.name == b.name);
            let name = |n: usize| ports[n % ports.len()].name.clone();
            let statics = statics.into_iter().map(|((mut mac, vlan), port)| {
                mac[0] &= 0xfe;
                Static { address: StaticAddress { mac, vlan }, port: name(port) }
            });
            let mut statics: Vec<_> = statics.collect();
            statics.sort_by_key(|entry| entry.address);
            statics.dedup_by_key(|entry| entry.address);
            Config { settings, ports, statics }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// `ctl save`, then `run --config`; the schema accepts the file, too.
    #[test]
    fn a_saved_configuration_is_the_same_when_read(saved in any_config()) {
        let text = saved.to_toml();
        let read = File::parse(Path::new("x.toml"), &text);
        let read = read.map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?.config;
        prop_assert!(saved.diff(&read).is_empty(), "{:?}\n{text}", saved.diff(&read));
        prop_assert!(read.diff(&saved).is_empty(), "{:?}\n{text}", read.diff(&saved));
        prop_assert_eq!(read.to_toml(), text.clone());
        let errors = crate::json_schema::errors(&text);
        prop_assert!(errors.is_empty(), "{errors:?}\n{text}");
    }

    /// A half-written file, cut anywhere, is read or rejected; nothing panics.
    #[test]
    fn a_file_that_is_cut_is_read_or_rejected(saved in any_config(), at in any::<Index>()) {
        let text = saved.to_toml();
        let cuts: Vec<_> = text.char_indices().map(|(at, _)| at).collect();
        let cut = &text[..cuts[at.index(cuts.len())]];
        if let Err(problems) = File::parse(Path::new("x.toml"), cut) {
            prop_assert!(problems.0.iter().all(|p| p.line >= Some(1) && p.column >= Some(1)));
        }
    }

    /// A diff lists each port once, and says what differs.
    #[test]
    fn a_diff_lists_each_port_once(from in any_config(), to in any_config()) {
        let diff = from.diff(&to);
        let mut names: Vec<_> = diff.added.iter().map(|port| port.name.as_str()).collect();
        names.extend(diff.removed.iter().map(String::as_str));
        for port in diff.replaced.iter().chain(&diff.changed) {
            prop_assert!(!port.settings.is_empty());
            names.push(&port.port.name);
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        prop_assert_eq!(names.len(), count);
        prop_assert!(from.diff(&from).is_empty());
    }
}

#[test]
fn only_what_differs_is_in_the_diff() {
    let old = config(
        r#"
        poll = "event"
        workers = 1
        [static]
        "02:00:00:00:00:01" = "a"
        "02:00:00:00:00:02/5" = "b"
        [port]
        a = { kind = "vhost-user", socket = "/a" }
        b = { kind = "vhost-user", socket = "/b", weight = 2, "poll/0" = "spin" }
        c = { kind = "vhost-user", socket = "/c", queues = 2 }
        d = { kind = "null" }
        e = { kind = "null", weight = 1 }
        f = { kind = "tap", interface = "t0" }
        "#,
    );
    let new = config(
        r#"
        poll = "spin"
        workers = 2
        ageing = 300
        [static]
        "02:00:00:00:00:01" = "e"
        "02:00:00:00:00:02/5" = "b"
        [port]
        a = { kind = "vhost-user", socket = "/a", mode = "server", queues = 1 }
        b = { kind = "vhost-user", socket = "/b", limit-messages = 5 }
        c = { kind = "vhost-user", socket = "/c", queues = 4, weight = 3 }
        e = { kind = "null" }
        f = { kind = "tap", interface = "t1" }
        g = { kind = "null" }
        "#,
    );
    let diff = old.diff(&new);
    let texts = |settings: &[SettingDiff]| -> Vec<String> {
        settings.iter().map(|s| format!("{}: {} -> {}", s.setting, s.from, s.to)).collect()
    };
    assert_eq!(texts(&diff.settings), ["poll: event -> spin"]);
    assert_eq!(texts(&diff.restart), ["workers: 1 -> 2"]);
    assert_eq!(diff.removed, ["d"]);
    assert_eq!(diff.added.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["g"]);
    let of = |ports: &[PortDiff]| -> Vec<(String, Vec<String>)> {
        ports.iter().map(|p| (p.port.name.clone(), texts(&p.settings))).collect()
    };
    let changed = [
        "poll/0: spin -> as `poll`",
        "weight: 2 -> 1",
        "limit-messages: default (4000 per second, burst 8000) -> 5",
    ];
    assert_eq!(of(&diff.changed), [("b".into(), changed.map(String::from).to_vec())]);
    let queues = ["queues: 2 -> 4", "weight: 1 -> 3"].map(String::from).to_vec();
    let interface = vec!["interface: t0 -> t1".into()];
    assert_eq!(of(&diff.replaced), [("c".into(), queues), ("f".into(), interface)]);
    assert_eq!(diff.statics.iter().map(|s| &*s.port).collect::<Vec<_>>(), ["e"]);
    assert_eq!(diff.statics_removed.iter().map(|s| &*s.port).collect::<Vec<_>>(), ["a"]);
}

#[test]
fn parts_that_are_valid_alone_may_conflict() {
    let text = "[port]\na = { kind = \"vhost-user\", socket = \"/s\" }\n\
                b = { kind = \"vhost-user\", socket = \"/s\" }\n\
                c = { kind = \"vhost-user\", socket = \"/s\", mode = \"client\" }\n\
                d = { kind = \"tap\", interface = \"t\" }\n\
                e = { kind = \"tap\", interface = \"t\", netns = \"blue\" }\n\
                f = { kind = \"tap\", interface = \"t\" }\n\
                [static]\n\"02:00:00:00:00:01\" = \"dd\"\n";
    let file = File::parse(Path::new("x.toml"), text).unwrap();
    let command_line = Config { ports: vec!["a=null".parse().unwrap()], ..Config::default() };
    let errors = file.with(command_line).unwrap_err().to_string();
    let want = [
        "x.toml:3:1: port 'b': socket /s is already used by port 'a'",
        "x.toml:7:1: port 'f': interface t is already used by port 'd'",
        "x.toml:2:1: port 'a' exists already: give each port its own name",
        "x.toml:9:1: static address 02:00:00:00:00:01: no port 'dd' (did you mean 'd'?)",
    ];
    assert_eq!(errors, want.join("\n"));
    let none = File::default().with(Config::default()).unwrap_err().to_string();
    assert!(none.contains("no ports: add --port"), "{none}");
    let many: String = (0..4097).map(|n| format!("[port.p{n}]\nkind=\"null\"\n")).collect();
    let many = File::parse(Path::new("x.toml"), &many).unwrap().with(Config::default());
    let many = many.unwrap_err().to_string();
    assert!(many.contains("4097 ports: a switch has at most 4096"), "{many}");
}

#[test]
fn options_set_at_run_time_replace_those_of_queues() {
    let mut port: PortText = "a=vhost-user:/a,queues=2,poll/1=spin,weight=2".parse().unwrap();
    let given = |key: &str, value: &str| crate::port::option(Kind::VhostUser, key, value).unwrap();
    port.set(given("weight/1", "5"));
    port.set(given("poll", "event"));
    port.set(given("poll/0", "napi"));
    port.set(given("poll/0", "timer"));
    let config = Config { ports: vec![port], ..Config::default() };
    let want = "[port.a]\nkind = \"vhost-user\"\nsocket = \"/a\"\npoll = \"event\"\nqueues = 2\n\
                weight = 2\n\"poll/0\" = \"timer\"\n\"weight/1\" = 5\n";
    assert_eq!(config.to_toml(), want);
}

#[test]
fn static_addresses_may_have_a_vlan() {
    let address = |text: &str| text.parse::<StaticAddress>();
    assert_eq!(address("02:00:00:00:00:01/5").unwrap().to_string(), "02:00:00:00:00:01/5");
    for text in ["02:00:00:00:00:01/0", "02:00:00:00:00:01/4095", "02:00:00:00:00:01/x"] {
        assert!(address(text).unwrap_err().contains("with a VLAN ID of 1 to 4094"), "{text}");
    }
    assert!(address("x/5").unwrap_err().contains("not a MAC address"));
}
