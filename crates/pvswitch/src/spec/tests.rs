use api::QUEUES_MAX;
use api::schema::Type;
use api::schema::policy::{Args, FORMS, Form, Number};
use api::schema::port::{VIRTIO_FEATURES, XEN_FEATURES};
use switch::poll::POLICIES;

use super::*;

fn error(s: &str) -> String {
    s.parse::<PortSpec>().unwrap_err().to_string()
}

#[test]
fn every_kind_and_option() {
    let port: PortSpec =
        "vm1=vhost-user:/tmp/a=b.sock,mode=client,queues=4,mtu=9000,mac=02:00:00:00:00:0a,\
         without=event-idx+IN_ORDER,memory=any,polled=off,poll=coalesce:50,32,weight=4,\
         limit-mapped-bytes=8G,limit-messages=500"
            .parse()
            .unwrap();
    let want = VhostUser {
        socket: "/tmp/a=b.sock".into(),
        role: Role::Client,
        queues: 4,
        mtu: Some(9000),
        mac: Some([2, 0, 0, 0, 0, 10]),
        without: feature::EVENT_IDX | feature::IN_ORDER,
        permissions: Permissions { any_memory: true, polled: false },
        access: Access::default(),
    };
    assert_eq!(port.kind, Kind::VhostUser(want));
    let poll = Policy::Coalesce { usecs: 50, frames: 32 };
    assert_eq!((port.tuning.poll.all(), port.tuning.weight.all()), (Some(poll), Some(4)));
    let limits: Vec<_> = port.tuning.limits.all().collect();
    assert_eq!(limits, [("mapped-bytes", 8 << 30), ("messages", 500)]);
    let port: PortSpec = "h=tap:tap0,netns=blue".parse().unwrap();
    assert!(matches!(port.kind, Kind::Tap(Tap { netns: Some(ns), .. }) if ns == "blue"));
    let port: PortSpec = "x=xen:3/1,queues=2,without=sg+ctrl-ring".parse().unwrap();
    assert_eq!(port.kind.to_string(), "xen:3/1");
    let Kind::Xen(xen) = &port.kind else { panic!("a Xen port") };
    assert_eq!((&xen.at, xen.offer.queues), (&XenAt::Vif(VifId { domid: 3, devid: 1 }), 2));
    assert!(!xen.offer.has("gso-tcpv4") && !xen.offer.has("smart-poll"));
    let port: PortSpec = "x=xen-local:/run/v,smart-poll=on".parse().unwrap();
    assert_eq!(port.kind.to_string(), "xen-local:/run/v");
    assert!(matches!(&port.kind, Kind::Xen(xen) if xen.offer.has("smart-poll")));
    let port: PortSpec = "x=xen-local:/run/v,socket-mode=0660,socket-group=kvm".parse().unwrap();
    let access = Access { mode: Some(0o660), group: Some("kvm".into()) };
    assert!(matches!(&port.kind, Kind::Xen(xen) if xen.access == access));
    assert_eq!("x=xen:auto".parse::<PortSpec>().unwrap().kind.to_string(), "xen:auto");
    assert_eq!("n=null".parse::<PortSpec>().unwrap().kind, Kind::Null);
}

#[test]
fn permissions_of_sockets_do_not_depend_on_the_umask() {
    let of = |options: &str| {
        let port: PortSpec = format!("a=vhost-user:/tmp/a{options}").parse().unwrap();
        let Kind::VhostUser(conf) = port.kind else { panic!("a vhost-user port") };
        conf.access.permissions("socket").map(|p| (p.mode, p.group.map(|group| group.id)))
    };
    assert_eq!(of(""), Ok((0o600, None)));
    assert_eq!(of(",socket-group=36"), Ok((0o660, Some(36))));
    assert_eq!(of(",socket-group=36,socket-mode=0640"), Ok((0o640, Some(36))));
    assert_eq!(of(",socket-mode=666"), Ok((0o666, None)));
    let none = of(",socket-group=pvs-none").unwrap_err();
    assert!(none.contains("socket-group=pvs-none: this machine has no such group"), "{none}");
    let client = error_of_client("socket-group=kvm");
    assert!(client.contains("socket-group: with mode=client the peer creates"), "{client}");
    assert!(error_of_client("socket-mode=0660").contains("socket-mode: with mode=client"));
    assert!(error("a=vhost-user:/a,socket-mode=0060").contains("socket-mode=0060: use perm"));
    assert!(
        error("a=tap:t0,socket-mode=0660")
            .contains("belongs to vhost-user, stream, dgram, xen-local,")
    );
}

fn error_of_client(option: &str) -> String {
    error(&format!("a=vhost-user:/tmp/a,mode=client,{option}"))
}

#[test]
fn queues_may_have_policies_of_their_own() {
    let port: PortSpec = "a=vhost-user:/tmp/a,queues=3,poll/2=coalesce:50,32,poll=spin,\
                          call/0=timer:500,poll/1=event"
        .parse()
        .unwrap();
    let polls = [0, 1, 2].map(|queue| port.tuning.poll.of(queue).unwrap().to_string());
    assert_eq!(polls, ["spin", "event", "coalesce:50,32"]);
    let calls = [0, 1, 2].map(|queue| port.tuning.call.of(queue));
    assert_eq!(calls, [Some(Policy::Timer { hz: 500 }), None, None]);
    assert!("x=xen:auto,poll/3=event".parse::<PortSpec>().is_ok(), "four are offered");
    assert!("n=null,call/0=event".parse::<PortSpec>().is_ok());
}

#[test]
fn invalid_queues_and_policies_are_rejected() {
    assert!(error("a=vhost-user:/tmp/a,poll/1=spin").contains("poll/1: there is one queue"));
    let last = error("a=tap:t0,queues=2,call/2=spin");
    assert!(last.contains("call/2: there are 2 queue pairs, 0 to 1"), "{last}");
    for queue in ["16", "x", "-1", ""] {
        let what = error(&format!("a=tap:t0,queues=16,poll/{queue}=spin"));
        assert!(what.contains("use poll/QUEUE, a queue pair's number, 0 to 15"), "{what}");
    }
    let policy = error("a=tap:t0,call/0=spn");
    assert!(policy.contains("call/0=spn: unknown policy 'spn': use one of event"), "{policy}");
    let policy = error("a=tap:t0,call=spn");
    assert!(policy.contains("call=spn: unknown policy 'spn'"), "{policy}");
    let other = error("a=tap:t0,queues/0=2");
    let single = "only poll, call, weight, hold can be set for single queues";
    assert!(other.contains(single), "{other}");
}

#[test]
fn invalid_limits_are_rejected_with_the_valid_range() {
    for kind in ["vhost-user:/tmp/a", "tap:t0", "xen:auto", "xen-local:/tmp/a", "null"] {
        let near = error(&format!("a={kind},limit-mapings=4"));
        assert!(near.contains("(did you mean 'limit-mappings'?); known: "), "{near}");
        assert!(near.contains("mirror-direction, limit-mapped-bytes, limit-mappings,"), "{near}");
        let range = error(&format!("a={kind},limit-mappings=4K"));
        assert!(range.contains("limit-mappings=4K: use 0 to 1000000000"), "{range}");
        let queue = error(&format!("a={kind},limit-mappings/0=4"));
        assert!(queue.contains("hold can be set for single queues"), "{queue}");
        assert!(format!("a={kind},limit-log-lines=1").parse::<PortSpec>().is_ok());
    }
    let bytes = error("a=null,limit-held-bytes=4X");
    assert!(bytes.contains("use 0 to 131072T bytes, with unit K, M, G, T or none"), "{bytes}");
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    assert!(error("vhost-user:/tmp/a").contains("NAME=KIND:ARG"));
    assert!(error("a=vhost-usr:/tmp/a").contains("did you mean 'vhost-user'?"));
    assert!(error("a=pcap:x").contains("not supported by this version"));
    assert!(error("a=xen:1").contains("use xen:DOMID/DEVID"));
    assert!(error("a=xen:65536/0").contains("use xen:DOMID/DEVID"));
    assert!(error("a=xen-local:").contains("use xen-local:DIR"));
    assert!(error("a=xen:auto,queues=17").contains("use 1 to 16"));
    assert!(error("a=xen:auto,without=ctrl-rings").contains("did you mean 'ctrl-ring'?"));
    assert!(error("a=xen:auto,smart-poll=yes").contains("smart-poll=yes: use on, off"));
    assert!(error("a=xen:auto,mtu=9000").contains("known: queues, without, tap, smart-poll"));
    assert!(error("a=xen:1/0,tap=vif").contains("use xen:auto,tap=vif"));
    assert!(error("a=vhost-user:/tmp/a,queue=2").contains("did you mean 'queues'?"));
    assert!(error("a=vhost-user:/tmp/a,queues=0").contains("use 1 to 16"));
    assert!(error("a=vhost-user:/tmp/a,queues=many").contains("queues=many: use 1 to 16"));
    assert!(error("a=vhost-user:/tmp/a,mode=sever").contains("did you mean 'server'?"));
    assert!(error("a=vhost-user:/tmp/a,mode").contains("has no value"));
    assert!(error("a=vhost-user:/tmp/a,mtu=20").contains("68 to 9216"));
    assert!(error("a=vhost-user:/tmp/a,mac=ff:ff:ff:ff:ff:ff").contains("the broadcast"));
    assert!(error("a=vhost-user:").contains("no socket path"));
    assert!(error(&format!("a=vhost-user:/{}", "x".repeat(107))).contains("108 bytes long"));
    let other = error("a=null,netns=blue");
    assert!(
        other.contains(
            "option 'netns' belongs to tap, af-packet, af-xdp, not to kind null; known: "
        ),
        "{other}"
    );
    let others = error("a=tap:t0,without=CSUM");
    assert!(others.contains("belongs to vhost-user, xen, xen-local, not to kind tap;"), "{others}");
    assert!(error("a=null,weight=0").contains("use 1 to 100"));
    assert!(error("a=null,poll=evnt").contains("use one of event"));
    let feature = error("a=vhost-user:/tmp/a,without=event-id");
    assert!(feature.contains("did you mean 'EVENT_IDX'?"), "{feature}");
    assert!(error("a/b=null").contains("letters, digits"));
    assert!(error("a=tap:much-too-long-a-name").contains("1 to 15"));
}

#[test]
fn the_schema_and_the_crates_that_serve_ports_agree() {
    let number = |name: &str| {
        let entry = port::common().find(|entry| entry.name == name).unwrap();
        let Type::Number(_, max) = entry.value else { panic!("{name} is a number") };
        (max, entry.default.parse::<u64>().unwrap())
    };
    assert_eq!(number("weight").0, u64::from(switch::fair::WEIGHT_MAX));
    assert_eq!(number("hold").0, u64::from(switch::hold::HOLD_MAX));
    assert_eq!([QUEUES_MAX; 2], [vhost_user::net::PAIRS_MAX, back::QUEUES_MAX]);
    assert_eq!(VIRTIO_FEATURES, feature::names(u64::MAX));
    assert_eq!(XEN_FEATURES, back::FEATURES);
    let limits = port::common().filter_map(|entry| entry.name.strip_prefix(LIMIT));
    assert_eq!(limits.collect::<Vec<_>>(), NAMES);
    let account = Account::default();
    let all = NAMES.map(|name| format!(",{LIMIT}{name}=7")).concat();
    format!("a=null{all}").parse::<PortSpec>().unwrap().tuning.limits.apply(&account);
    assert!(account.entries().iter().all(|entry| entry.limit == 7));
}

#[test]
fn every_policy_of_the_schema_is_one_of_the_switch() {
    assert_eq!(FORMS.map(|form| form.form), POLICIES);
    for Form { word, args, .. } in FORMS {
        let bounds = |number: Number| [number.min, number.max];
        let texts = match args {
            Args::None => vec![word.to_string()],
            Args::Maybe(number) => {
                let numbers = bounds(number).map(|n| format!("{word}:{n}"));
                [vec![word.to_string()], numbers.to_vec()].concat()
            }
            Args::Two(one, two) => {
                let ends = bounds(one).into_iter().zip(bounds(two));
                ends.map(|(a, b)| format!("{word}:{a},{b}")).collect()
            }
            Args::Pending(number) => bounds(number).map(|n| format!("{word}:{n}/pending")).to_vec(),
        };
        for text in texts {
            policy(&text);
        }
    }
}
