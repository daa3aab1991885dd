//! Interface of the handshake to xenstore, so that any order of events is tested without sockets.

/// A request that xenstore refused, or a lost connection: see [`Tree::is_gone`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// A tree of keys. Paths without a leading slash are relative to our domain's directory.
pub trait Tree {
    /// Whether the connection is lost; otherwise, single requests were refused.
    fn is_gone(&self) -> bool;

    /// The value at `path`; `None`: it does not exist, or we may not read it.
    fn read(&mut self, path: &str) -> Result<Option<String>, Failure>;

    /// Writes all of `keys` below `dir` in one transaction, if `dir/anchor` exists. Returns whether
    /// it does. A directory that the toolstack removed must not be created again.
    fn write(
        &mut self,
        dir: &str,
        anchor: &str,
        keys: &[(String, String)],
    ) -> Result<bool, Failure>;

    /// Writes a single key, if permitted.
    fn write_key(&mut self, path: &str, value: &str) -> Result<(), Failure>;

    /// Removes a key or directory, if it exists.
    fn remove(&mut self, path: &str) -> Result<(), Failure>;

    /// Names directly below `dir`; empty if it does not exist.
    fn list(&mut self, dir: &str) -> Result<Vec<String>, Failure>;

    /// Registers a watch with `token` on changes at and below `path`.
    fn watch(&mut self, path: &str, token: &str) -> Result<(), Failure>;

    /// Removes a watch.
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), Failure>;
}
