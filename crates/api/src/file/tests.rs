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
    let file = file.config;
    let settings = &file.settings;
    assert_eq!(
        (settings.policy("poll").as_deref(), settings.number("workers")),
        (Some("event"), Some(2))
    );
    assert_eq!((settings.word("placement"), settings.cpus("cpus")), (Some("per-port"), vec![2, 3]));
    assert_eq!(settings.address("http").unwrap().to_string(), "127.0.0.1:9000");
    assert_eq!(settings.number("ageing"), Some(300), "by default");
    let address = StaticAddress { mac: [2, 0, 0, 0, 0, 1], vlan: 0 };
    assert_eq!(file.statics, [Static { address, port: "vm1".into() }]);
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
    assert!(later.contains("not supported by this version"), "{later}");
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
    assert!(beyond.starts_with("x.toml:5:1: "), "{beyond}");
    let other = port("\"queues/1\" = 3");
    assert!(other.contains("unknown field `queues/1`"), "{other}");
}

#[test]
fn options_that_exclude_each_other_are_located_at_one_of_them() {
    let head = "[port.a]\nkind = \"vhost-user\"\nsocket = \"s\"\nweight = 2\n";
    for (lines, at, want) in [
        ("vlan = 5\ntrunk = 6\n", "5:1", "vlan=5 and trunk= exclude each other"),
        ("isolated = true\nnative = 5\n", "6:1", "native=5 needs a trunk"),
        ("burst-in = \"4K\"\n", "5:1", "burst-in= in bytes needs a rate"),
        ("mode = \"client\"\nsocket-mode = \"0660\"\n", "6:1", "with mode=client the peer"),
        ("\"weight/0\" = 3\n\"poll/3\" = \"spin\"\n", "6:1", "there is one queue pair"),
    ] {
        let error = error(&format!("{head}{lines}"));
        let located = error.starts_with(&format!("x.toml:{at}: port 'a': "));
        assert!(located && error.contains(want), "{lines}: {error}");
    }
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

/// A directory, removed on drop.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pvs-api-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Errors of a file, with the directory's name removed.
    fn errors(&self, path: &Path) -> String {
        let errors = File::load(path).unwrap_err().to_string();
        errors.replace(&format!("{}/", self.0.display()), "")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn all_errors_are_reported_in_order() {
    let text = "workers = 0\npol = \"event\"\n[port.a]\nkind = \"null\"\nwait = 3\nhold = -1\n\
                [port.b]\nknd = \"null\"\n[port.c]\nkind = \"tap\"\ninterfce = \"t\"\n";
    let errors = error(text);
    let at: Vec<_> = errors.lines().map(|l| l.split(": ").next().unwrap().to_string()).collect();
    let want = ["1:11", "2:1", "5:1", "6:8", "8:1", "11:1"].map(|at| format!("x.toml:{at}"));
    assert_eq!(at, want, "{errors}");
    assert!(errors.contains("port 'b': unknown field `knd` (did you mean `kind`?)"), "{errors}");
    assert!(errors.contains("port 'c': unknown field `interfce`"), "{errors}");
    // Errors of syntax alone, several of them.
    let syntax = error("a = \nb = 1\nc = [\n");
    assert!(syntax.lines().count() >= 2 && syntax.contains("x.toml:1:"), "{syntax}");
    let many: String = (0..1000).map(|n| format!("x{n} = 1\n")).collect();
    let errors = error(&many);
    assert!(errors.lines().count() == 21 && errors.ends_with("980 more errors"), "{errors}");
}

#[test]
fn columns_are_in_characters_and_control_characters_are_escaped() {
    let errors = error("\"é–\" = 1\n[port.\"a\\nFAKE\"]\nkind = \"null\"\n");
    assert!(errors.starts_with("x.toml:1:1: unknown field `é–`"), "{errors}");
    let errors = error("cpus = [\"é\", []]\n");
    assert!(errors.starts_with("x.toml:1:14: "), "{errors}");
    let name = error("[port.\"a\\nFAKE\"]\nkind = \"null\"\n");
    assert!(name.lines().count() == 1 && name.contains("port 'a\\nFAKE': name"), "{name}");
    for name in ["..", ".", ".a", "-a", "a b", "a\"b", "a{b", "", "aaaaaaaaaaaaaaaa"] {
        let error = error(&format!("[port.'{name}']\nkind = \"null\"\n"));
        assert!(error.contains("not begin with '-' or '.'"), "{error}");
    }
    let path = error("[port.a]\nkind = \"vhost-user\"\nsocket = \"/tmp/a\\u001b[2J\"\n");
    assert!(path.contains("'/tmp/a\\u{1b}[2J' must not have control characters"), "{path}");
    let netns = error("[port.a]\nkind = \"tap\"\ninterface = \"t\"\nnetns = \"\\n\"\n");
    assert!(netns.contains("netns: '\\n' must not have control characters"), "{netns}");
}

#[test]
fn included_files_hold_ports_and_static_addresses() {
    let dir = Dir::new("include");
    let main =
        dir.write("x.toml", "include = \"x.d\"\npoll = \"event\"\n[port.m]\nkind = \"null\"\n");
    let missing = dir.errors(&main);
    assert!(missing.contains("cannot read configuration x.d"), "{missing}");
    assert!(missing.contains("it is the `include` directory"), "{missing}");
    dir.write(
        "x.d/10-b.toml",
        "[port.b]\nkind = \"null\"\n[static]\n\"02:00:00:00:00:01\" = \"m\"\n",
    );
    dir.write("x.d/20-a.toml", "[port.a]\nkind = \"null\"\n");
    dir.write("x.d/empty.toml", "");
    dir.write("x.d/.30-c.toml", "not TOML");
    dir.write("x.d/30-c.toml.tmp", "not TOML");
    let file = File::load(&main).unwrap();
    let names: Vec<_> = file.config.ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!((names, file.included.len()), (vec!["a", "b", "m"], 3));
    assert!(file.with(Config::default()).is_ok());
    dir.write(
        "x.d/30-c.toml",
        "[port.a]\nkind = \"null\"\n\npoll = \"spin\"\n[port.n]\nkind=\"nul\"\n",
    );
    dir.write(
        "x.d/40-d.toml",
        "workers = 2\ninclude = \"y\"\n[prt.a]\n[static]\n\"02:00:00:00:00:01\" = \"b\"\n",
    );
    let errors = dir.errors(&main);
    let want = [
        "x.d/30-c.toml:1:7: port 'a' exists already, at x.d/20-a.toml:1:7",
        "x.d/30-c.toml:6:6: port 'n': unknown kind `nul`, expected one of `vhost-user`, `stream`, \
         `dgram`, `passt`, `tap`, `af-packet`, `af-xdp`, `xen`, `xen-local`, `null` (did you \
         mean `null`?)",
        "x.d/40-d.toml:1:1: `workers` is a setting of the switch: write it in x.toml; an included \
         file has [port.NAME] and [static] only",
        "x.d/40-d.toml:2:1: `include` is a setting of the switch: write it in x.toml; an included \
         file has [port.NAME] and [static] only",
        "x.d/40-d.toml:3:2: unknown field `prt`, expected one of `port`, `static` (did you mean \
         `port`?)",
        "x.d/40-d.toml:5:1: static address 02:00:00:00:00:01 exists already, at x.d/10-b.toml:4:1",
    ];
    assert_eq!(errors, want.join("\n"));
}

#[test]
fn only_regular_files_of_bounded_size_are_read() {
    let dir = Dir::new("read");
    let fifo = dir.0.join("fifo.toml");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for (path, want) in [
        (fifo.as_path(), "not a regular file"),
        (Path::new("/dev/zero"), "not a regular file"),
        (&dir.0, "not a regular file"),
        (&dir.write("latin.toml", [b'#', 0xe9, b'\n']), "UTF-8"),
        (&dir.write("huge.toml", vec![b'\n'; (4 << 20) + 1]), "at most 4 MiB, including"),
    ] {
        let error = File::load(path).unwrap_err().to_string();
        assert!(error.contains(want), "{}: {error}", path.display());
    }
    // 4 MiB are read in reasonable time, valid or not.
    let fits = File::load(&dir.write("fits.toml", vec![b'\n'; 4 << 20])).unwrap();
    assert!(fits.empty && fits.config.ports.is_empty());
    let garbage = File::load(&dir.write("garbage.toml", "=\n".repeat(1 << 20))).unwrap_err();
    assert_eq!(garbage.0.len(), PROBLEMS_MAX + 1);
    // Included files count, too.
    let main = dir.write("x.toml", "include = \"x.d\"\n");
    dir.write("x.d/1.toml", vec![b'\n'; 2 << 20]);
    dir.write("x.d/2.toml", vec![b'\n'; 2 << 20]);
    let error = dir.errors(&main);
    assert!(error.contains("x.d/2.toml") && error.contains("at most 4 MiB"), "{error}");
}
