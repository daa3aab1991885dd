use super::*;

fn parse(text: &str) -> File {
    File::parse(Path::new("x.toml"), text).unwrap()
}

fn error(text: &str) -> String {
    File::parse(Path::new("x.toml"), text).unwrap_err().to_string()
}

#[test]
fn a_whole_file() {
    let file = parse(
        r#"
        poll = "event"
        workers = 2
        cpus = [2, 3]
        placement = "per-port"
        http = "9000"
        [static]
        "02:00:00:00:00:01" = "vm1"
        [port.vm1]
        kind = "vhost-user"
        socket = "/tmp/vm1.sock"
        queues = 4
        "poll/3" = "spin"
        poll = "timer:2000"
        "call/0" = "coalesce:50,32"
        weight = 3
        limit-mapped-bytes = "16G"
        limit-mappings = 64
        [port.up]
        kind = "tap"
        interface = "tap0"
        [port.zlocal]
        kind = "xen-local"
        directory = "/run/v"
        smart_poll = true
    "#,
    );
    let settings = &file.settings;
    assert_eq!(
        (settings.policy("poll").as_deref(), settings.number("workers")),
        (Some("event"), Some(2))
    );
    assert_eq!((settings.word("placement"), settings.cpus("cpus")), (Some("per-port"), vec![2, 3]));
    assert_eq!(settings.address("http").unwrap().to_string(), "127.0.0.1:9000");
    assert_eq!(settings.number("ageing"), Some(300), "by default");
    assert_eq!(file.statics, [([2, 0, 0, 0, 0, 1], "vm1".into())]);
    let names: Vec<_> = file.ports.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["up=tap:tap0", "vm1=vhost-user:/tmp/vm1.sock", "zlocal=xen-local:/run/v"]);
    let port = &file.ports[1];
    assert_eq!((port.number("queues"), port.number("weight")), (Some(4), Some(3)));
    assert_eq!(port.number("limit-mapped-bytes"), Some(16 << 30));
    assert_eq!(file.ports[2].word("smart-poll"), Some("on"));
    assert_eq!(file.ports[2].number("queues"), Some(4), "by default");
    let mut of_queues: Vec<_> = port
        .options
        .iter()
        .filter_map(|given| Some((given.entry.name, given.queue?, given.value.text()?)))
        .collect();
    of_queues.sort_unstable();
    assert_eq!(of_queues, [("call", 0, "coalesce:50,32"), ("poll", 3, "spin")]);
}

#[test]
fn a_typo_is_reported_with_line_column_and_nearest_key() {
    let typo = error("workers = 1\n  pol = \"event\"\n");
    assert!(typo.starts_with("x.toml:2:3: "), "{typo}");
    assert!(typo.contains("did you mean `poll`?"), "{typo}");
    let port = error("[port.a]\nkind = \"vhost-user\"\nsockt = \"/tmp/a\"\n");
    assert!(port.starts_with("x.toml:3:1: port 'a': unknown field `sockt`"), "{port}");
    assert!(port.contains("did you mean `socket`?"), "{port}");
    let kind = error("[port.a]\nkind = \"vhost-uzer\"\n");
    assert!(
        kind.starts_with("x.toml:2:8: ") && kind.contains("did you mean `vhost-user`?"),
        "{kind}"
    );
    let later = error("[port.a]\nkind = \"pcap\"\n");
    assert!(later.contains("not in this version"), "{later}");
    let flag = error("quiet = true\n");
    assert!(flag.contains("unknown field `quiet`"), "{flag}");
}

#[test]
fn invalid_values_are_rejected() {
    for (text, at, want) in [
        ("poll = \"evnt\"\n", "1:8", "poll=evnt: unknown policy 'evnt': use one of event"),
        ("placement = \"balance\"\n", "1:13", "did you mean 'balanced'?"),
        ("workers = 200\n", "1:11", "workers=200: use 1 to 63"),
        ("workers = \n", "1:", ""),
        ("cpus = [1, []]\n", "1:12", "cpus: invalid type: array, expected a number"),
        ("cpus = [9999]\n", "1:8", "there is no such CPU: 9999"),
        ("static = 1\n", "1:10", "static: invalid type: integer, expected a table"),
        ("[static]\nx = \"a\"\n", "2:1", "'x' is not a MAC address"),
        ("port = 1\n", "1:8", "port: invalid type: integer, expected a table"),
        ("[port.a]\nsocket = \"a\"\n", "1:", "port 'a': missing field `kind`"),
        ("[port.a]\nqueues = 2\nknd = \"tap\"\n", "3:1", "port 'a': unknown field `knd` (did you"),
        ("[port.a]\nkind = \"tap\"\n", "1:", "port 'a': missing field `interface`"),
        ("[port.a]\nkind = 1\n", "2:8", "port 'a': kind: invalid type: integer, expected a string"),
        ("[port.a]\nkind = \"tap\"\ninterface = \"\"\n", "3:13", "port 'a': interface name ''"),
        ("[port.a]\nkind = \"xen\"\nvif = \"x\"\n", "3:7", "use xen:DOMID/DEVID"),
        ("[port.a]\nkind = \"null\"\n[port.a]\nkind = \"null\"\n", "3:", "duplicate"),
        ("[port.'a/b']\nkind = \"null\"\n", "1:", "letters, digits"),
    ] {
        let error = error(text);
        assert!(error.starts_with(&format!("x.toml:{at}")), "{text}: {error}");
        assert!(error.contains(want), "{text}: {error}");
    }
    let missing = File::load(Path::new("/nonexistent/x.toml")).unwrap_err().to_string();
    assert!(missing.contains("cannot read configuration /nonexistent/x.toml"), "{missing}");
}

#[test]
fn policies_of_nonexistent_queues_are_rejected() {
    let port = |lines: &str| {
        error(&format!("[port.a]\nkind = \"tap\"\ninterface = \"t\"\nqueues = 2\n{lines}\n"))
    };
    let beyond = port("\"poll/2\" = \"spin\"");
    assert!(beyond.contains("port 'a': poll/2: there are 2 queue pairs, 0 to 1"), "{beyond}");
    let number = port("\"call/x\" = \"spin\"");
    assert!(number.contains("call/x=spin: use call/QUEUE"), "{number}");
    let policy = port("\"call/1\" = \"spn\"");
    assert!(policy.contains("call/1=spn: unknown policy 'spn': use one of"), "{policy}");
    let value = port("\"call/1\" = 3");
    assert!(value.starts_with("x.toml:5:") && value.contains("string"), "{value}");
    let other = port("\"weight/1\" = 3");
    assert!(other.contains("unknown field `weight/1`"), "{other}");
}

#[test]
fn invalid_limits_are_rejected_with_the_valid_range() {
    let port =
        |line: &str| error(&format!("[port.a]\nkind = \"tap\"\ninterface = \"t\"\n{line}\n"));
    for typo in ["limit-mapings", "limt-mappings", "limit_mappings"] {
        let near = port(&format!("{typo} = 4"));
        assert!(near.contains(&format!("unknown field `{typo}`")), "{near}");
        assert!(near.contains("did you mean `limit-mappings`?"), "{near}");
        assert!(near.starts_with("x.toml:4:"), "{near}");
    }
    for value in ["-1", "1.5", "true", "\"4K\"", "1000000001"] {
        let range = port(&format!("limit-mappings = {value}"));
        let want = format!("limit-mappings={}: use 0 to 1000000000", value.trim_matches('"'));
        assert!(range.contains(&format!("port 'a': {want}")), "{range}");
    }
    let bytes = port("limit-held-bytes = \"4X\"");
    assert!(bytes.contains("use 0 to 131072T bytes, with unit K, M, G, T or none"), "{bytes}");
}
