//! What the handshake needs of xenstore: a seam, so that every order of events is tested without
//! sockets.

/// Xenstore refuses, or does not answer any more: [`Tree::is_gone`] says which.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// A tree of keys. Paths that do not start with a slash are below our own domain's directory.
pub trait Tree {
    /// Whether the connection is lost: everything else was a refusal, of that one request.
    fn is_gone(&self) -> bool;

    /// The value at `path`; `None`: there is none, or it is not ours to read.
    fn read(&mut self, path: &str) -> Result<Option<String>, Failure>;

    /// Writes all of `keys` below `dir` in one transaction, if `dir/anchor` exists; returns
    /// whether it did. A directory that its toolstack removed must not come back by our writing.
    fn write(
        &mut self,
        dir: &str,
        anchor: &str,
        keys: &[(String, String)],
    ) -> Result<bool, Failure>;

    /// Writes one key that stands alone, as far as that is permitted.
    fn note(&mut self, path: &str, value: &str) -> Result<(), Failure>;

    /// Removes a key or directory, if it exists.
    fn remove(&mut self, path: &str) -> Result<(), Failure>;

    /// The names directly below `dir`; none, if there is no such directory.
    fn list(&mut self, dir: &str) -> Result<Vec<String>, Failure>;

    /// Asks to be told of changes at and below `path`, with `token`.
    fn watch(&mut self, path: &str, token: &str) -> Result<(), Failure>;

    /// Ends a watch.
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), Failure>;
}
