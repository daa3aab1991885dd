//! All states of a model, depth first.

use std::collections::HashSet;
use std::fmt::Debug;

/// States that may come next, and what leads there.
pub type Steps<S> = Vec<(&'static str, S)>;

/// A state of a model.
pub trait State: Debug + Sized {
    /// Hash of all that decides what may come.
    fn hash(&self) -> u64;
    /// What must hold in every state.
    fn check(&self) -> Result<(), String>;
    /// What must hold where nothing comes next.
    fn check_end(&self) -> Result<(), String>;
}

/// Visits all states from `first` on whose hash is not in `seen`; returns the way to the first in
/// which something does not hold.
pub fn search<S: State>(
    first: S,
    seen: &mut HashSet<u64>,
    mut steps: impl FnMut(&S) -> Steps<S>,
) -> Result<(), String> {
    let mut way: Vec<(&'static str, Steps<S>)> = vec![("", vec![("", first)])];
    while let Some((_, steps_left)) = way.last_mut() {
        let Some((name, world)) = steps_left.pop() else {
            way.pop();
            continue;
        };
        if !seen.insert(world.hash()) {
            continue;
        }
        let next = steps(&world);
        let end = if next.is_empty() { world.check_end() } else { Ok(()) };
        if let Err(what) = world.check().and(end) {
            let names: Vec<_> = way.iter().map(|(name, _)| *name).chain([name]).collect();
            return Err(format!("{what}: {}: {world:?}", names.join(", ")));
        }
        way.push((name, next));
    }
    Ok(())
}
