//! Arbitrary bytes of a client of the control socket, into the decoder of requests and the table of
//! operations.
//!
//! ```text
//!   split   (u16)   where the input is received in two parts
//!   bytes   ...
//! ```
//! What is found does not depend on where the bytes are split: all at once, one by one, and in two
//! parts there are the same requests and the same problem. The decoder keeps no more than a
//! head and
//! a body. A request that is found, written out again, is the same; one that is an operation passes
//! through the client's encoding unchanged.

use std::collections::BTreeSet;

use api::http::{BODY_MAX, Decoder, HEAD_MAX, Incoming, Step};
use api::routes::{Server, route, to_http};

use crate::Bytes;

/// Events of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests found.
    pub requests: usize,
    /// Names of operations requested.
    pub operations: BTreeSet<&'static str>,
    /// Statuses of input that is no request.
    pub invalid: BTreeSet<u16>,
    /// Statuses of requests that are no operation.
    pub refused: BTreeSet<u16>,
    /// Clients that waited for `100 Continue`.
    pub continued: usize,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    let at = usize::from(bytes.u16()).min(bytes.0.len());
    let (first, second) = bytes.0.split_at(at);
    let mut seen = Seen::default();
    let all = decode(std::iter::once(bytes.0), &mut seen);
    assert_eq!(decode([first, second].into_iter(), &mut seen), all, "split at {at}");
    assert_eq!(decode(bytes.0.chunks(1), &mut seen), all, "byte by byte");
    for step in &all {
        match step {
            Step::Request(incoming) => check_request(incoming, &mut seen),
            Step::Invalid(problem) => {
                assert!(!problem.detail.is_empty() && !problem.remedy.is_empty());
                seen.invalid.insert(problem.status);
            }
            Step::Incomplete | Step::Continue => {}
        }
    }
    seen
}

/// Requests and the problem in these parts of a connection's input.
fn decode<'a>(parts: impl Iterator<Item = &'a [u8]>, seen: &mut Seen) -> Vec<Step> {
    let mut decoder = Decoder::default();
    let (mut steps, mut has_ended, mut continues) = (Vec::new(), false, false);
    for part in parts {
        decoder.push(part);
        loop {
            match decoder.take() {
                Step::Incomplete => break,
                Step::Continue => {
                    assert!(!continues, "a client is invited once");
                    continues = true;
                    seen.continued += 1;
                }
                step => {
                    assert!(!has_ended, "nothing follows a problem");
                    has_ended = matches!(step, Step::Invalid(_));
                    continues = false;
                    steps.push(step);
                }
            }
        }
        let kept = decoder.kept();
        assert!(kept <= HEAD_MAX + BODY_MAX && (!has_ended || kept == 0), "{kept} bytes are kept");
        assert_eq!(decoder.is_partial(), kept > 0 || continues || decoder.has_head());
    }
    steps
}

/// Checks a request.
fn check_request(incoming: &Incoming, seen: &mut Seen) {
    seen.requests += 1;
    assert!(incoming.body.len() <= BODY_MAX && incoming.target.len() < HEAD_MAX);
    assert_eq!(again(incoming), *incoming);
    for server in [Server::Switch, Server::Guest] {
        let routed = match route(server, incoming) {
            Ok(routed) => routed,
            Err(problem) => {
                assert!(!problem.detail.is_empty() && !problem.remedy.is_empty());
                seen.refused.insert(problem.status);
                continue;
            }
        };
        seen.operations.insert(routed.operation.name);
        let (method, target, body) = to_http(&routed.request);
        let sent = Incoming {
            method: method.into(),
            target,
            media_type: Some(api::http::JSON.into()),
            body: body.map(|body| body.to_string().into_bytes()).unwrap_or_default(),
            persists: true,
        };
        // JSON without white space, but with escapes that the client need not use.
        if sent.body.len() <= BODY_MAX {
            let arrived = again(&sent);
            assert_eq!(arrived, sent);
            let arrived = route(server, &arrived).expect("what a client sends is valid");
            assert_eq!(arrived.request, routed.request);
        }
    }
}

/// The request as it is found in its own text.
fn again(incoming: &Incoming) -> Incoming {
    let Incoming { method, target, media_type, body, persists } = incoming;
    let mut text = format!("{method} {target} HTTP/1.1\r\nHost: x\r\n");
    if let Some(media_type) = media_type {
        text += &format!("Content-Type: {media_type}\r\n");
    }
    if !persists {
        text += "Connection: close\r\n";
    }
    text += &format!("Content-Length: {}\r\n\r\n", body.len());
    let mut decoder = Decoder::default();
    decoder.push(text.as_bytes());
    decoder.push(body);
    match decoder.take() {
        Step::Request(incoming) => incoming,
        other => panic!("{other:?} for {text:?}"),
    }
}

/// Start inputs: each operation, and each way to be refused.
pub fn seeds() -> Vec<Vec<u8>> {
    let host = "Host: x\r\n";
    let json = |method: &str, target: &str, body: &str| {
        format!(
            "{method} {target} HTTP/1.1\r\n{host}Content-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\n{host}\r\n");
    let with = |fields: &str| format!("PUT / HTTP/1.1\r\n{host}{fields}\r\n");
    let chunked = |body: &str| with("Transfer-Encoding: chunked\r\n") + body;
    let long = "x".repeat(HEAD_MAX);
    let texts = [
        get("/v1/status") + &get("/v1/ports/vm1/why?seconds=0.5"),
        json("PUT", "/v1/ports/vm1", "{\"kind\":\"null\"}") + &get("/v1/ports"),
        json("PATCH", "/v1/ports/vm1/queues/0", "{\"poll\":\"spin\"}"),
        json("PUT", "/v1/fdb/02:00:00:00:00:01?vlan=7", "{\"port\":\"vm1\"}"),
        json("POST", "/v1/upgrade", "{\"program\":\"/usr/bin/pvswitch\"}"),
        get("/v1/ports/-x?y"),
        "BREW /v1/ports HTTP/1.1\r\nHost: x\r\n\r\n".into(),
        get("http://localhost/v1/fdb") + "DELETE /v1/fdb/02%3a00:00:00:00:01 HTTP/1.0\r\n\r\n",
        "POST /v1/reload?dry_run=true HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".into(),
        json("PATCH", "/v1/settings", "{\"poll\":1}").replace("Content-Type", "X-Type"),
        chunked("2;x=y\r\n{}\r\n3\r\n \t \r\n0\r\nTrailer: z\r\n\r\n"),
        chunked("10000000000000000\r\n"),
        chunked("1ffff\r\n"),
        chunked(&format!("1;{}\r\nx\r\n0\r\n\r\n", "y".repeat(300))),
        chunked(&format!("0\r\n{}\r\n", "A: b\r\n".repeat(40))),
        with("Expect: 100-continue\r\nContent-Length: 2\r\n") + "{}",
        with("Expect: 200-ok\r\n"),
        with("Content-Length: 65537\r\n"),
        with("Content-Length: 65536\r\n") + &"x".repeat(BODY_MAX),
        with("Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"),
        with("Transfer-Encoding: gzip\r\n"),
        with(&"A: b\r\n".repeat(40)),
        with(&format!("A: {}\r\n", "\u{e9}".repeat(5000))),
        with(&"A: b\r\n".repeat(30)) + &get("/x HTTP/2"),
        get(&format!("/{long}")),
        // Problems of which a part of the bytes shows another one.
        format!("GET /{long} HTTP/1.1\r\n{host}\0\r\n\r\n"),
        format!("G\0T /{long}"),
        "GET / HTTP/3\r\nX: HTTP/2\r\n\r\n".into(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(),
        "\r\n\r\n\nGET / HTTP/1.1\r\n\r\n".into(),
    ];
    texts.into_iter().map(|text| [&[9, 0][..], text.as_bytes()].concat()).collect()
}
