//! `run --http`: counters and state over HTTP, for Prometheus, scripts and browsers.
//!
//! A separate thread serves all clients and sleeps while there are none. It forwards requests to
//! the control thread, as `pvswitch ctl` does, so that replies are made in one place; workers are
//! not involved. The interface is read-only.

mod control;
mod history;
mod live;
mod metrics;

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::task::{Context, Poll};
use std::time::Duration;

use api::Address;
use api::Request;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use os::{Carries, Listener, Permissions, SocketError, ThreadKind};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use control::Control;
pub use control::Query;
use live::Live;

/// Maximum number of clients at a time; further ones wait.
const CLIENTS_MAX: usize = 16;
/// Maximum time from a client's connection to the end of its reply.
const CLIENT_TIME_MAX: Duration = Duration::from_secs(10);
/// Maximum length of a request's head, in bytes.
const HEAD_MAX: usize = 8192;
/// Pause after a failed accept (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// The page for browsers.
const PAGE: &str = include_str!("http/page.html");

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// Error that prevents the start of the HTTP server.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The address is in use, not local, or unknown.
    #[error("cannot serve HTTP at {address}: {error}{}", advice(error))]
    Listen {
        /// The address as given.
        address: Address,
        /// The system's error.
        error: std::io::Error,
    },
    /// The Unix socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A thread or descriptor cannot be created.
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

/// The control thread's end of the server.
pub struct Server {
    /// Pending requests.
    pub queries: Receiver<Query>,
    wake: Arc<OwnedFd>,
    /// URL for the log.
    pub url: String,
    /// The Unix socket, if it serves one; removes its path on drop.
    pub socket: Option<Listener>,
    /// The TCP listener, if it serves one.
    pub tcp: Option<OwnedFd>,
    accepts: watch::Sender<bool>,
    permits: Arc<Semaphore>,
}

/// A listener of another process: the switch before, or the parent process.
pub enum Inherited {
    /// A TCP listener.
    Tcp(OwnedFd),
    /// A Unix socket.
    Unix(Listener),
}

impl AsFd for Server {
    /// Readable when requests are pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Server {
    /// Binds the address, or takes over a listener of another process, and starts the server's
    /// thread, which [accepts nothing](Self::set_accepting) at first. A Unix socket has these
    /// permissions.
    ///
    /// # Errors
    /// [`HttpError`]: the address, the socket or the thread.
    pub fn start(
        address: &Address,
        permissions: &Permissions,
        inherited: Option<Inherited>,
    ) -> Result<Self, HttpError> {
        let listen = |error| HttpError::Listen { address: address.clone(), error };
        let (mut tcp, mut socket) = (None, None);
        let inherited = match (address, inherited) {
            (_, Some(inherited)) => inherited,
            (Address::Tcp(host, port), None) => {
                Inherited::Tcp(bind(host, *port).map_err(listen)?.into())
            }
            (Address::Unix(path), None) => {
                Inherited::Unix(Listener::bind(path, Carries::Stream, permissions)?)
            }
            (Address::Inherited(_), None) => {
                return Err(listen(std::io::ErrorKind::NotFound.into()));
            }
        };
        let (acceptor, url) = match inherited {
            Inherited::Tcp(fd) => {
                let listener = TcpListener::from(fd);
                listener.set_nonblocking(true)?;
                let at = listener.local_addr().map_err(listen)?;
                warn_if_remote(at);
                tcp = Some(listener.as_fd().try_clone_to_owned()?);
                (Acceptor::Tcp(listener), format!("http://{at}/"))
            }
            Inherited::Unix(own) => {
                if permissions.is_for_all() {
                    tracing::warn!(
                        "HTTP at {address} can be read by every user of this machine: names, \
                         sockets and counters of all ports; restrict it with --http-mode"
                    );
                }
                // As at the control socket: to close one may block the thread of this server.
                os::refuse_descriptors(own.as_fd());
                let listener = UnixListener::from(own.as_fd().try_clone_to_owned()?);
                socket = Some(own);
                (Acceptor::Unix(listener), address.to_string())
            }
        };
        let (sender, queries) = mpsc::channel();
        let wake = Arc::new(os::eventfd()?);
        let site = Site::new(Control::new(sender, Arc::clone(&wake)));
        let permits = Arc::new(Semaphore::new(CLIENTS_MAX));
        let (accepts, accepting) = watch::channel(false);
        let gate = Gate { accepting, permits: Arc::clone(&permits) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("http".into());
        os::spawn(thread, ThreadKind::Http, move || {
            if let Err(error) = runtime.block_on(serve(acceptor, gate, site)) {
                tracing::error!("HTTP server stopped: {error}");
            }
        })?;
        tracing::info!("HTTP at {url}");
        Ok(Self { queries, wake, url, socket, tcp, accepts, permits })
    }

    /// Starts or stops accepting connections. Meanwhile they wait in the listener, which another
    /// process may serve next.
    pub fn set_accepting(&self, on: bool) {
        self.accepts.send_replace(on);
    }

    /// Whether there are accepted connections, or may be for a moment: with `set_accepting(false)`
    /// no further ones are added once this is false.
    pub fn has_clients(&self) -> bool {
        self.permits.available_permits() < CLIENTS_MAX
    }
}

fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    TcpListener::bind(&*addresses)
}

fn warn_if_remote(at: SocketAddr) {
    if !at.ip().is_loopback() {
        tracing::warn!(
            "HTTP at {at} can be reached from other machines without a password: names, sockets \
             and counters of all ports are readable by anyone"
        );
    }
}

// ---- the HTTP thread ----

/// What replies are made from.
struct Site {
    control: Arc<Control>,
    live: Arc<Live>,
}

impl Site {
    fn new(control: Control) -> Arc<Self> {
        let control = Arc::new(control);
        Arc::new(Self { live: Live::new(Arc::clone(&control)), control })
    }
}

enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// When connections are accepted.
struct Gate {
    accepting: watch::Receiver<bool>,
    /// One for each connection, and one for the next while it is awaited.
    permits: Arc<Semaphore>,
}

/// Serves connections until the control thread's end of the server is dropped, and then those that
/// were accepted.
async fn serve(acceptor: Acceptor, gate: Gate, site: Arc<Site>) -> std::io::Result<()> {
    match acceptor {
        Acceptor::Tcp(listener) => {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let accept =
                |cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
            accept_all(accept, gate, &site).await;
        }
        Acceptor::Unix(listener) => {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            let accept =
                |cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
            accept_all(accept, gate, &site).await;
        }
    }
    Ok(())
}

async fn accept_all<S>(
    accept: impl Fn(&mut Context<'_>) -> Poll<std::io::Result<S>>,
    mut gate: Gate,
    site: &Arc<Site>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    while gate.accepting.wait_for(|on| *on).await.is_ok() {
        let Ok(permit) = Arc::clone(&gate.permits).acquire_owned().await else { break };
        let accepted = {
            let mut closed = pin!(gate.accepting.wait_for(|on| !*on));
            // First whether the gate is closed: no connection is accepted after that.
            poll_fn(|cx| match closed.as_mut().poll(cx) {
                Poll::Ready(_) => Poll::Ready(None),
                Poll::Pending => accept(cx).map(Some),
            })
            .await
        };
        match accepted {
            Some(accepted) => admit(accepted, permit, site).await,
            None if gate.accepting.has_changed().is_err() => break,
            None => {}
        }
    }
    let _ = gate.permits.acquire_many(CLIENTS_MAX as u32).await;
}

async fn admit<S>(accepted: std::io::Result<S>, permit: OwnedSemaphorePermit, site: &Arc<Site>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    match accepted {
        Ok(stream) => {
            tokio::spawn(client(stream, permit, Arc::clone(site)));
        }
        Err(error) => {
            tracing::debug!("HTTP client: {error}");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// Serves one client: one request, one reply.
async fn client<S>(stream: S, permit: OwnedSemaphorePermit, site: Arc<Site>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let site = Arc::clone(&site);
        async move { Ok::<_, Infallible>(reply(&request, &site).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CLIENT_TIME_MAX, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("HTTP client: {error}"),
        Err(_) => tracing::debug!("HTTP client disconnected: it exceeded {CLIENT_TIME_MAX:?}"),
    }
    drop(permit);
}

async fn reply(request: &hyper::Request<Incoming>, site: &Site) -> Response<Full<Bytes>> {
    // hyper omits the body of a reply to HEAD.
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut reply = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are supported\n");
        reply.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return reply;
    }
    let control = &site.control;
    let body = match request.uri().path() {
        "/" => Some((PAGE.into(), "text/html; charset=utf-8")),
        "/stats" => control.call(Request::Stats).await.map(|v| (format!("{v}\n"), JSON)),
        "/show" => control.call(Request::Show).await.map(|v| (format!("{v}\n"), JSON)),
        "/fdb" => control.call(Request::Fdb).await.map(|v| (format!("{v}\n"), JSON)),
        "/events" => control.call(Request::LastEvents).await.map(|v| (format!("{v}\n"), JSON)),
        "/live" => site.live.reply(since(request.uri().query())).await.map(|text| (text, JSON)),
        "/metrics" => match (control.call(Request::Show).await, control.call(Request::Stats).await)
        {
            (Some(show), Some(stats)) => {
                Some((metrics::text(&show, &stats), metrics::CONTENT_TYPE))
            }
            _ => None,
        },
        _ => {
            let known = "not found: use /, /metrics, /stats, /show, /fdb, /events or /live\n";
            return plain(StatusCode::NOT_FOUND, known);
        }
    };
    match body {
        Some((body, kind)) => respond(StatusCode::OK, body, kind),
        None => plain(StatusCode::SERVICE_UNAVAILABLE, "the switch is shutting down\n"),
    }
}

/// The time in `since=SECONDS`; without it, or with anything else, everything.
fn since(query: Option<&str>) -> f64 {
    let pairs = query.unwrap_or_default().split('&');
    let since = pairs.filter_map(|pair| pair.strip_prefix("since=")?.parse().ok()).next();
    since.unwrap_or(f64::NEG_INFINITY)
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    respond(status, text.into(), TEXT)
}

fn respond(status: StatusCode, body: String, kind: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                  connect-src 'self'; img-src data:";
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(hyper::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
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
            ("fd=web", Ok(Address::Inherited("web".into()))),
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
    fn addresses_are_displayed_as_given() {
        for text in ["127.0.0.1:9100", "[::1]:80", "unix:/tmp/x"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }
}
