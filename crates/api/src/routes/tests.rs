use serde_json::json;

use super::*;

fn incoming(method: &str, target: &str, body: &str) -> Incoming {
    Incoming {
        method: method.into(),
        target: target.into(),
        media_type: Some("application/json; charset=utf-8".into()),
        body: body.into(),
        persists: true,
    }
}

fn routed(method: &str, target: &str, body: &str) -> Result<Request, Problem> {
    route(Server::Switch, &incoming(method, target, body)).map(|routed| routed.request)
}

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// One request of each operation.
fn all() -> Vec<Request> {
    let name = || "vm-1.x_".to_string();
    let settings = || object(json!({ "weight": "3", "poll": "spin" }));
    let mac = || "02:00:00:00:00:01".to_string();
    vec![
        Request::Show,
        Request::Stats,
        Request::Ports,
        Request::Port { name: name() },
        Request::PortStats { name: name() },
        Request::Why { name: name(), seconds: 0.25 },
        Request::Why { name: name(), seconds: 1.0 },
        Request::AddPort { name: name(), port: object(json!({ "kind": "null" })) },
        Request::DelPort { name: name() },
        Request::SetPort { name: name(), settings: settings() },
        Request::SetQueue { name: name(), queue: 3, settings: settings() },
        Request::Drain { name: name() },
        Request::Resume { name: name() },
        Request::Capture { name: name() },
        Request::Workers,
        Request::Accounts,
        Request::Fdb,
        Request::FdbAdd { mac: mac(), port: name(), vlan: 4094 },
        Request::FdbDel { mac: mac(), vlan: 0 },
        Request::Set { settings: settings() },
        Request::SetPair { queue: 15, settings: settings() },
        Request::Config,
        Request::Reload { dry_run: true },
        Request::Upgrade { program: Some("/a b/ü".into()) },
        Request::Upgrade { program: None },
        Request::Shutdown,
        Request::Events,
        Request::LastEvents,
        Request::Openapi,
    ]
}

#[test]
fn every_request_has_an_operation_and_arrives_as_it_was_sent() {
    for request in all() {
        let operation = Operation::of(&request);
        let (method, target, body) = to_http(&request);
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let server = if operation.server == Server::Guest { Server::Guest } else { Server::Switch };
        let arrived = route(server, &incoming(method, &target, &body)).unwrap();
        assert_eq!(arrived.request, request, "{method} {target} {body}");
        assert_eq!(arrived.operation.name, operation.name);
    }
    let names: std::collections::BTreeSet<_> = all().iter().map(Request::name).collect();
    let known: std::collections::BTreeSet<_> =
        OPERATIONS.iter().map(|operation| operation.name.to_string()).collect();
    assert_eq!(names, known, "each operation is a request, and the other way around");
    assert_eq!(known.len(), OPERATIONS.len(), "names are unique");
}

/// What shows frames or changes anything is not for everyone who may connect.
#[test]
fn operations_that_change_or_show_frames_need_the_right_to() {
    for operation in OPERATIONS {
        let reads = operation.right == Right::Read;
        let shows_frames = matches!(operation.reply, Reply::Capture) || operation.name == "config";
        assert_eq!(reads, operation.method == "GET" && !shows_frames, "{}", operation.name);
    }
    let own = |operation: &&Operation| operation.right == Right::Own;
    let own: Vec<_> = OPERATIONS.iter().filter(own).map(|o| o.name).collect();
    assert_eq!(own, ["upgrade"]);
}

#[test]
fn fields_have_their_places() {
    let target = "/v1/fdb/02%3a00:00:00:00:01?vlan=7";
    let want = Request::FdbAdd { mac: "02:00:00:00:00:01".into(), port: "a".into(), vlan: 7 };
    assert_eq!(routed("PUT", target, "{\"port\":\"a\"}"), Ok(want));
    let reload = |dry_run| Ok(Request::Reload { dry_run });
    assert_eq!(routed("POST", "/v1/reload", ""), reload(false));
    assert_eq!(routed("POST", "http://localhost/v1/reload?&dry_run=true", ""), reload(true));
    assert_eq!(routed("POST", "/v1/upgrade", "{}"), Ok(Request::Upgrade { program: None }));
    assert_eq!(routed("HEAD", "/v1/status", ""), Ok(Request::Show));
}

#[test]
fn invalid_requests_name_field_value_and_remedy() {
    let cases = [
        ("GET", "/", "", 404, "path", "there is no path"),
        ("GET", "/v1/port", "", 404, "path", "did you mean '/v1/ports'?"),
        ("GET", "/v1/status/", "", 404, "path", "there is no path"),
        ("GET", "/v1/ports/a/b", "", 404, "path", "there is no path"),
        ("PATCH", "/v1/queues/0", "{\"poll\":\"spin\"}", 404, "path", "is for a guest"),
        ("POST", "/v1/status", "", 405, "method", "use GET, HEAD"),
        ("PUT", "/v1/reload", "", 405, "method", "use POST"),
        ("get", "/v1/status", "", 405, "method", "no method get"),
        ("GET", "/v1/ports/-x", "", 400, "path.name", "must be 1 to 15 letters"),
        ("GET", "/v1/ports/%2e%2e", "", 400, "path.name", "must be 1 to 15 letters"),
        ("GET", "/v1/ports/a%0ab", "", 400, "path.name", "'a\\nb'"),
        ("GET", "/v1/ports/%zz", "", 400, "path.name", "percent-encoded"),
        ("GET", "/v1/ports/%ff", "", 400, "path.name", "percent-encoded"),
        ("GET", "/v1/ports/0123456789abcdef", "", 400, "path.name", "1 to 15 letters"),
        ("DELETE", "/v1/fdb/01:00:5e:00:00:01", "", 400, "path.mac", "multicast"),
        ("DELETE", "/v1/fdb/x", "", 400, "path.mac", "is not a MAC address"),
        ("DELETE", "/v1/fdb/02:00:00:00:00:01?vlan=4095", "", 400, "query.vlan", "4094"),
        ("DELETE", "/v1/fdb/02:00:00:00:00:01?vlan=-1", "", 400, "query.vlan", "4094"),
        ("DELETE", "/v1/fdb/02:00:00:00:00:01?vlan=1&vlan=1", "", 400, "query.vlan", "twice"),
        ("DELETE", "/v1/fdb/02:00:00:00:00:01?vln=1", "", 400, "query.vln", "mean 'vlan'?"),
        ("POST", "/v1/reload?dry_run=1", "", 400, "query.dry_run", "use true or false"),
        ("POST", "/v1/reload?dry_run=%g", "", 400, "query.dry_run", "percent-encoded"),
        ("GET", "/v1/ports/a/why?seconds=61", "", 400, "query.seconds", "use 0 to 60"),
        ("GET", "/v1/ports/a/why?seconds=-1", "", 400, "query.seconds", "use 0 to 60"),
        ("GET", "/v1/ports/a/why?seconds=NaN", "", 400, "query.seconds", "use 0 to 60"),
        ("GET", "/v1/ports/a/why?seconds=inf", "", 400, "query.seconds", "use 0 to 60"),
        ("GET", "/v1/status?x=1", "", 400, "query.x", "there are no parameters"),
        ("GET", "/v1/status", "{}", 400, "body", "has no body"),
        ("PUT", "/v1/ports/a", "", 400, "body", "needs a body"),
        ("PUT", "/v1/ports/a", "{\"kind\":", 400, "body", "is not JSON"),
        ("PUT", "/v1/ports/a", "[]", 400, "body", "not a JSON object"),
        ("PUT", "/v1/ports/a", "\u{0}", 400, "body", "is not JSON"),
        ("PUT", "/v1/fdb/02:00:00:00:00:01", "{}", 400, "body.port", "is missing"),
        ("PUT", "/v1/fdb/02:00:00:00:00:01", "{\"port\":1}", 400, "body.port", "use a port's name"),
        ("PUT", "/v1/fdb/02:00:00:00:00:01", "{\"prt\":\"a\"}", 400, "body.prt", "mean 'port'?"),
        ("POST", "/v1/upgrade", "{\"program\":\"x\"}", 400, "body.program", "absolute path"),
        ("POST", "/v1/upgrade", "{\"program\":[]}", 400, "body.program", "absolute path"),
        ("PATCH", "/v1/ports/a/queues/16", "{\"poll\":\"spin\"}", 400, "path.queue", "0 to 15"),
        ("PATCH", "/v1/ports/a/queues/x", "{\"poll\":\"spin\"}", 400, "path.queue", "0 to 15"),
    ];
    for (method, target, body, status, field, want) in cases {
        let error = routed(method, target, body).unwrap_err();
        assert_eq!((error.status, error.field.as_deref()), (status, Some(field)), "{error:?}");
        assert!(error.detail.contains(want), "{method} {target} {body}: {error:?}");
        assert!(!error.remedy.is_empty() && !error.detail.contains(char::is_control), "{error:?}");
    }
    let plain = Incoming { media_type: None, ..incoming("PUT", "/v1/ports/a", "{}") };
    let error = route(Server::Switch, &plain).unwrap_err();
    assert_eq!((error.status, error.field.as_deref()), (415, Some("header.content-type")));
    let show = incoming("GET", "/v1/status", "");
    let error = route(Server::Guest, &show).unwrap_err();
    assert!(error.detail.contains("this is the socket of a guest"), "{error}");
}

#[test]
fn a_path_knows_its_methods() {
    let of = |target| methods(Server::Switch, target);
    assert_eq!(of("/v1/ports/a?x").as_deref(), Some("GET, PUT, PATCH, DELETE, HEAD"));
    assert_eq!(of("/v1/shutdown").as_deref(), Some("POST"));
    assert_eq!(of("/v1/nothing"), None);
}
