use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;

/// All steps until more bytes are needed.
fn steps(decoder: &mut Decoder) -> Vec<Step> {
    let mut all = Vec::new();
    loop {
        match decoder.take() {
            Step::Incomplete => return all,
            Step::Continue => {
                all.push(Step::Continue);
                return all;
            }
            step => all.push(step),
        }
    }
}

fn decode(text: &str) -> Vec<Step> {
    let mut decoder = Decoder::default();
    decoder.push(text.as_bytes());
    steps(&mut decoder)
}

fn request(method: &str, target: &str, body: &str) -> Incoming {
    let (method, target) = (method.into(), target.into());
    Incoming { method, target, media_type: None, body: body.into(), persists: true }
}

const HOST: &str = "Host: x\r\n";

#[test]
fn requests_are_found_wherever_the_bytes_are_split() {
    let text = format!(
        "\r\nGET /a?b=1 HTTP/1.1\r\n{HOST}\r\n\
         PUT /c HTTP/1.1\r\n{HOST}Content-Length: 3\r\n\r\n{{}}\n\
         POST /d HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n3\r\ncde\r\n\
         0\r\nTrailer: z\r\n\r\nGET /e HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"
    );
    let last = Incoming { persists: false, ..request("GET", "/e", "") };
    let want = [
        request("GET", "/a?b=1", ""),
        request("PUT", "/c", "{}\n"),
        request("POST", "/d", "abcde"),
        last,
    ]
    .map(Step::Request);
    assert_eq!(decode(&text), want);
    for size in 1..text.len() {
        let mut decoder = Decoder::default();
        let mut found = Vec::new();
        for part in text.as_bytes().chunks(size) {
            decoder.push(part);
            found.extend(steps(&mut decoder));
        }
        assert_eq!(found, want, "in parts of {size} bytes");
        assert!(!decoder.is_partial());
    }
}

#[test]
fn a_partial_request_is_neither_a_request_nor_an_error() {
    let text = format!("PUT / HTTP/1.1\r\n{HOST}Content-Length: 9\r\n\r\n12345678");
    for end in 0..text.len() {
        let mut decoder = Decoder::default();
        decoder.push(&text.as_bytes()[..end]);
        assert_eq!((steps(&mut decoder), decoder.is_partial()), (Vec::new(), end > 0), "{end}");
    }
}

#[test]
fn invalid_requests_have_a_status_a_place_and_a_remedy() {
    let long = "x".repeat(HEAD_MAX);
    let fields = "A: b\r\n".repeat(HEADERS_MAX + 1);
    let cases: &[(String, u16, Option<&str>)] = &[
        ("nonsense\r\n\r\n".into(), 400, None),
        ("{\"cmd\":\"stats\"}\n".into(), 400, None),
        ("\u{16}\u{3}\u{1}".into(), 400, None),
        ("GET /\r\n\r\n".into(), 400, None),
        ("GET / HTTP/1.1\r\n\r\n".into(), 400, Some("header.host")),
        (format!("GET / HTTP/1.1\r\n{HOST}{HOST}\r\n"), 400, Some("header.host")),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), 505, None),
        (format!("GET /{long}"), 414, Some("header")),
        (format!("GET / HTTP/1.1\r\nA: {long}"), 431, Some("header")),
        (format!("GET / HTTP/1.1\r\n{fields}\r\n"), 431, Some("header")),
        (format!("GET / HTTP/1.1\r\n{HOST}A\r\n\r\n"), 400, None),
        (format!("GET / HTTP/1.1\r\n{HOST}A: b\r\n c\r\n\r\n"), 400, None),
        (length("-1"), 400, Some("header.content-length")),
        (length("+1"), 400, Some("header.content-length")),
        (length("x"), 400, Some("header.content-length")),
        (length(""), 400, Some("header.content-length")),
        (length("1\r\nContent-Length: 1"), 400, Some("header.content-length")),
        (length("1\r\nTransfer-Encoding: chunked"), 400, Some("header.content-length")),
        (length("65537"), 413, Some("body")),
        (length("99999999999999999999"), 400, Some("header.content-length")),
        (coded("gzip", ""), 400, Some("header.transfer-encoding")),
        (coded("gzip, chunked", ""), 400, Some("header.transfer-encoding")),
        (coded("chunked", "z\r\n"), 400, Some("body")),
        (coded("chunked", &"0".repeat(300)), 400, Some("body")),
        (coded("chunked", "10001\r\n"), 413, Some("body")),
        (coded("chunked", "ffffffffffffffff\r\n"), 413, Some("body")),
        (coded("chunked", "1\r\nabc"), 400, Some("body")),
        (coded("chunked", &format!("0\r\nA: {long}")), 400, Some("body")),
        (format!("GET / HTTP/1.1\r\n{HOST}Expect: x\r\n\r\n"), 417, Some("header.expect")),
    ];
    for (text, status, field) in cases {
        let shown: String = text.chars().take(90).collect();
        let steps = decode(&format!("{text}GET / HTTP/1.1\r\n{HOST}\r\n"));
        let [Step::Invalid(problem)] = &steps[..] else { panic!("{shown:?}: {steps:?}") };
        assert_eq!((problem.status, problem.field.as_deref()), (*status, *field), "{shown:?}");
        assert!(!problem.detail.is_empty() && !problem.remedy.is_empty(), "{problem:?}");
    }
}

fn length(text: &str) -> String {
    format!("PUT / HTTP/1.1\r\n{HOST}Content-Length: {text}\r\n\r\n")
}

fn coded(coding: &str, body: &str) -> String {
    format!("PUT / HTTP/1.1\r\n{HOST}Transfer-Encoding: {coding}\r\n\r\n{body}")
}

/// A body in chunks has the same limit, and its bytes are not kept twice.
#[test]
fn the_longest_body_is_accepted_and_one_byte_more_is_not() {
    let body = "x".repeat(BODY_MAX);
    for text in [
        format!("PUT / HTTP/1.1\r\n{HOST}Content-Length: {BODY_MAX}\r\n\r\n{body}"),
        coded("chunked", &format!("{BODY_MAX:x}\r\n{body}\r\n0\r\n\r\n")),
    ] {
        assert_eq!(decode(&text), [Step::Request(request("PUT", "/", &body))]);
    }
    let text = coded("chunked", &format!("{BODY_MAX:x}\r\n{body}\r\n1\r\nx\r\n0\r\n\r\n"));
    assert!(matches!(&decode(&text)[..], [Step::Invalid(p)] if p.status == 413));
}

/// Random bytes, and requests with random changes, never panic and never exceed the bounds.
#[test]
fn any_bytes_are_requests_or_problems_within_the_bounds() {
    use proptest::prelude::*;
    let good =
        format!("PUT /a HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
    let changes = proptest::collection::vec((0..good.len(), any::<u8>()), 0..6);
    let bytes = proptest::collection::vec(any::<u8>(), 0..200);
    let mut runner = proptest::test_runner::TestRunner::default();
    let result = runner.run(&(changes, bytes, 1..50_usize), |(changes, bytes, size)| {
        let mut text = good.clone().into_bytes();
        changes.into_iter().for_each(|(at, byte)| text[at] = byte);
        text.extend(bytes);
        let mut decoder = Decoder::default();
        for part in text.chunks(size) {
            decoder.push(part);
            for step in steps(&mut decoder) {
                if let Step::Request(incoming) = step {
                    prop_assert!(incoming.body.len() <= text.len());
                }
            }
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_response_is_read_back_and_has_no_body_for_head_and_204() {
    let now = SystemTime::UNIX_EPOCH;
    let json = Response::json(200, &serde_json::json!({ "a": 1 }));
    let text = String::from_utf8(json.bytes(now, false, false)).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"),
        "{text}"
    );
    assert!(text.ends_with("Content-Length: 8\r\n\r\n{\"a\":1}\n"), "{text}");
    let head = String::from_utf8(json.bytes(now, true, true)).unwrap();
    assert!(head.ends_with("Content-Length: 8\r\nConnection: close\r\n\r\n"), "{head}");
    let nothing = String::from_utf8(Response::empty(204).bytes(now, false, false)).unwrap();
    assert!(!nothing.contains("Content-"), "{nothing}");
    let stream = String::from_utf8(Response::stream(EVENTS).bytes(now, false, false)).unwrap();
    assert!(stream.contains("Connection: close") && !stream.contains("Content-Length"), "{stream}");
}

fn pair() -> (Session, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (Session::new(ours), theirs)
}

#[test]
fn a_session_serves_requests_sent_ahead_one_by_one() {
    let (mut session, mut client) = pair();
    let text = format!("GET /1 HTTP/1.1\r\n{HOST}\r\nGET /2 HTTP/1.1\r\n{HOST}\r\n");
    client.write_all(text.as_bytes()).unwrap();
    for target in ["/1", "/2"] {
        assert_eq!(session.receive(), Received::Request(request("GET", target, "")));
        assert_eq!(session.has_more(), target == "/1");
        assert!(session.reply(&Response::empty(204)));
    }
    assert_eq!((session.receive(), session.is_waiting()), (Received::Nothing, false));
    drop(client);
    assert_eq!(session.receive(), Received::Closed);
}

/// A client that does not read gets no second reply: its requests stay in the socket.
#[test]
fn a_session_holds_one_reply() {
    let (mut session, mut client) = pair();
    let text = format!("GET / HTTP/1.1\r\n{HOST}\r\n");
    client.write_all(text.repeat(3).as_bytes()).unwrap();
    assert!(matches!(session.receive(), Received::Request(_)));
    let large = Response::json(200, &"x".repeat(4 << 20).into());
    assert!(session.reply(&large) && session.unread() > 0);
    assert_eq!((session.receive(), session.is_waiting()), (Received::Nothing, true));
    let mut read = vec![0; 1 << 20];
    let mut total = 0;
    while session.unread() > 0 {
        total += client.read(&mut read).unwrap();
        assert!(session.flush());
    }
    assert!(total > 3 << 20 && matches!(session.receive(), Received::Request(_)));
}

/// A client that sends a body which is too long reads why, although it is still sending.
#[test]
fn a_client_that_still_sends_reads_the_refusal() {
    let (mut session, mut client) = pair();
    let size = 4 << 20;
    let sender = std::thread::spawn(move || {
        let head = format!("PUT / HTTP/1.1\r\n{HOST}Content-Length: {size}\r\n\r\n");
        client.write_all(head.as_bytes()).unwrap();
        client.write_all(&vec![b'x'; size]).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        reply
    });
    let mut refused = 0;
    loop {
        match session.receive() {
            Received::Invalid(problem) => {
                assert_eq!(problem.status, 413);
                refused += 1;
            }
            Received::Closed => break,
            _ => std::thread::yield_now(),
        }
    }
    drop(session);
    let reply = sender.join().unwrap();
    assert!(reply.starts_with("HTTP/1.1 413 Content Too Large\r\n"), "{reply}");
    assert!(reply.contains("application/problem+json") && refused == 1, "{reply}");
}

#[test]
fn a_client_that_expects_100_gets_it_once() {
    let (mut session, mut client) = pair();
    let head = format!("PUT / HTTP/1.1\r\n{HOST}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    client.write_all(head.as_bytes()).unwrap();
    assert_eq!(session.receive(), Received::Nothing);
    let mut read = [0; 100];
    let n = client.read(&mut read).unwrap();
    assert_eq!(&read[..n], b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"{}").unwrap();
    assert_eq!(session.receive(), Received::Request(request("PUT", "/", "{}")));
    session.reply(&Response::empty(204));
    let mut last = Client::new(client).unwrap();
    assert!(last.stream().peer_addr().is_ok());
    let replies = std::thread::spawn(move || last.call("GET", "/", None));
    while !matches!(session.receive(), Received::Request(_)) {
        std::thread::yield_now();
    }
    session.reply(&Response::json(200, &true.into()));
    // The reply to its first request is the first that it reads.
    assert_eq!(replies.join().unwrap().unwrap(), (204, Vec::new()));
}
