//! All states of a model, depth first.

use std::collections::HashSet;
use std::fmt::Debug;

/// States that may come next, and what leads there.
pub type Steps<W> = Vec<(&'static str, W)>;

/// Visits all states from `first` on whose hash is not in `states`; returns the way to the first
/// for which `check` fails. It is also given whether nothing comes next.
pub fn search<W: Debug>(
    first: W,
    states: &mut HashSet<u64>,
    hash: impl Fn(&W) -> u64,
    mut steps: impl FnMut(&W) -> Steps<W>,
    check: impl Fn(&W, bool) -> Result<(), String>,
) -> Result<(), String> {
    let mut way: Vec<(&'static str, Steps<W>)> = vec![("", vec![("", first)])];
    while let Some((_, steps_left)) = way.last_mut() {
        let Some((name, world)) = steps_left.pop() else {
            way.pop();
            continue;
        };
        if !states.insert(hash(&world)) {
            continue;
        }
        let next = steps(&world);
        if let Err(what) = check(&world, next.is_empty()) {
            let names: Vec<_> = way.iter().map(|(name, _)| *name).chain([name]).collect();
            return Err(format!("{what}: {}: {world:?}", names.join(", ")));
        }
        way.push((name, next));
    }
    Ok(())
}
