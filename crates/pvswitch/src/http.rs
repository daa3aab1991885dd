//! `run --http`: counters and state over HTTP, for Prometheus, scripts and browsers.
//!
//! One thread of its own serves all clients and sleeps while there are none. What it tells it asks
//! the control thread for, as `pvswitch ctl` does, so that there is one place where answers are
//! made; the workers know nothing of it. It only reads: nothing can be changed this way.

mod metrics;

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::Address;
use api::control::Request;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use os::{Carries, Listener, SocketError};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Most clients at once; more wait until one is done.
const CLIENTS_MAX: usize = 16;
/// Longest time from a client's connection to the end of its answer.
const CLIENT_TIME_MAX: Duration = Duration::from_secs(10);
/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 8192;
/// After the system refused a connection (no descriptors left), the next is tried so much later.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// The page for people.
const PAGE: &str = include_str!("http/page.html");

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// Why it cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The address is taken, not ours, or unknown.
    #[error("cannot serve HTTP at {address}: {error}{}", advice(error))]
    Listen {
        /// As it was given.
        address: Address,
        /// Why.
        error: std::io::Error,
    },
    /// The Unix socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A thread or descriptor cannot be had.
    #[error("cannot serve HTTP: {0}")]
    Os(#[from] std::io::Error),
}

fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{AddrInUse, AddrNotAvailable, PermissionDenied};
    match error.kind() {
        AddrInUse => "; another process listens there: choose another port",
        AddrNotAvailable => "; use an address of this machine, such as 127.0.0.1",
        PermissionDenied => "; use a port above 1023",
        _ => "",
    }
}

/// A question to the control thread.
pub struct Asked {
    /// What is asked.
    pub request: Request,
    /// Where its answer goes.
    pub answer: oneshot::Sender<Value>,
}

/// The control thread's side of the server.
pub struct Server {
    /// Questions.
    pub asked: Receiver<Asked>,
    wake: Arc<OwnedFd>,
    /// Where it listens, for people.
    pub url: String,
    /// Removes the socket's name with itself.
    _socket: Option<Listener>,
}

impl AsFd for Server {
    /// Readable when there are questions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Server {
    /// Listens, and starts the thread that serves.
    ///
    /// # Errors
    /// [`HttpError`] says what stands in the way.
    pub fn start(address: &Address) -> Result<Self, HttpError> {
        let listen = |error| HttpError::Listen { address: address.clone(), error };
        let (acceptor, url, socket) = match address {
            Address::Tcp(host, port) => {
                let listener = bind(host, *port).map_err(listen)?;
                let at = listener.local_addr().map_err(listen)?;
                warn_of_strangers(at);
                (Acceptor::Tcp(listener), format!("http://{at}/"), None)
            }
            Address::Unix(path) => {
                let socket = Listener::bind(path, Carries::Stream)?;
                let listener = UnixListener::from(socket.as_fd().try_clone_to_owned()?);
                (Acceptor::Unix(listener), address.to_string(), Some(socket))
            }
        };
        let (ask, asked) = mpsc::channel();
        let wake = Arc::new(os::eventfd()?);
        let asker = Arc::new(Asker { ask: Mutex::new(ask), wake: Arc::clone(&wake) });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("http".into()).spawn(move || {
            if let Err(error) = runtime.block_on(serve(acceptor, asker)) {
                tracing::error!("HTTP is served no more: {error}");
            }
        })?;
        tracing::info!("HTTP at {url}");
        Ok(Self { asked, wake, url, _socket: socket })
    }
}

fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let listener = TcpListener::bind(&*addresses)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn warn_of_strangers(at: SocketAddr) {
    if !at.ip().is_loopback() {
        tracing::warn!(
            "HTTP at {at} can be reached from other machines, and asks nobody for a password: \
             names, sockets and counters of all ports are shown to whoever asks"
        );
    }
}

/// How the HTTP thread asks the control thread.
struct Asker {
    ask: Mutex<Sender<Asked>>,
    wake: Arc<OwnedFd>,
}

impl Asker {
    /// `None`: the switch is ending.
    async fn ask(&self, request: Request) -> Option<Value> {
        let (answer, answered) = oneshot::channel();
        {
            let ask = self.ask.lock().unwrap_or_else(PoisonError::into_inner);
            ask.send(Asked { request, answer }).ok()?;
        }
        os::signal(self.wake.as_fd());
        answered.await.ok()
    }
}

// ---- the HTTP thread ----

enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener),
}

async fn serve(acceptor: Acceptor, asker: Arc<Asker>) -> std::io::Result<()> {
    let places = Arc::new(Semaphore::new(CLIENTS_MAX));
    let place = || Arc::clone(&places).acquire_owned();
    match acceptor {
        Acceptor::Tcp(listener) => {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            while let Ok(place) = place().await {
                let accepted = listener.accept().await.map(|(stream, _)| stream);
                admit(accepted, place, &asker).await;
            }
        }
        Acceptor::Unix(listener) => {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            while let Ok(place) = place().await {
                let accepted = listener.accept().await.map(|(stream, _)| stream);
                admit(accepted, place, &asker).await;
            }
        }
    }
    Ok(())
}

async fn admit<S>(accepted: std::io::Result<S>, place: OwnedSemaphorePermit, asker: &Arc<Asker>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    match accepted {
        Ok(stream) => {
            tokio::spawn(client(stream, place, Arc::clone(asker)));
        }
        Err(error) => {
            tracing::debug!("HTTP client: {error}");
            tokio::time::sleep(REFUSED_PAUSE).await;
        }
    }
}

/// One client, one answer.
async fn client<S>(stream: S, place: OwnedSemaphorePermit, asker: Arc<Asker>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let asker = Arc::clone(&asker);
        async move { Ok::<_, Infallible>(answer(&request, &asker).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CLIENT_TIME_MAX, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("HTTP client: {error}"),
        Err(_) => tracing::debug!("HTTP client cut off: it took longer than {CLIENT_TIME_MAX:?}"),
    }
    drop(place);
}

async fn answer(request: &hyper::Request<Incoming>, asker: &Asker) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        let mut answer = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here\n");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return answer;
    }
    let body = match request.uri().path() {
        "/" => Some((PAGE.into(), "text/html; charset=utf-8")),
        "/stats" => asker.ask(Request::Stats).await.map(|v| (format!("{v}\n"), JSON)),
        "/show" => asker.ask(Request::Show).await.map(|v| (format!("{v}\n"), JSON)),
        "/metrics" => match (asker.ask(Request::Show).await, asker.ask(Request::Stats).await) {
            (Some(show), Some(stats)) => {
                Some((metrics::text(&show, &stats), metrics::CONTENT_TYPE))
            }
            _ => None,
        },
        _ => {
            let known = "not found: there are /, /metrics, /stats and /show\n";
            return plain(StatusCode::NOT_FOUND, known);
        }
    };
    match body {
        Some((body, kind)) => respond(StatusCode::OK, body, kind),
        None => plain(StatusCode::SERVICE_UNAVAILABLE, "the switch is ending\n"),
    }
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    respond(status, text.into(), TEXT)
}

fn respond(status: StatusCode, body: String, kind: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                  connect-src 'self'";
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(hyper::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_every_form() {
        let tcp = |host: &str, port| Ok(Address::Tcp(host.into(), port));
        let cases = [
            ("127.0.0.1:9100", tcp("127.0.0.1", 9100)),
            ("9100", tcp("127.0.0.1", 9100)),
            (":0", tcp("127.0.0.1", 0)),
            ("localhost:80", tcp("localhost", 80)),
            ("[::1]:80", tcp("::1", 80)),
            ("unix:/tmp/x", Ok(Address::Unix("/tmp/x".into()))),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse(), want, "{text}");
        }
        for bad in ["", "unix:", "::1:80", "host", "host:", "host:99999", "http://a:1"] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.contains("use HOST:PORT"), "{bad}: {error}");
        }
    }

    #[test]
    fn addresses_are_shown_as_they_are_given() {
        for text in ["127.0.0.1:9100", "[::1]:80", "unix:/tmp/x"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }
}
