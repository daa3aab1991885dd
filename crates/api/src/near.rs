//! Suggestions for misspelt words.

/// The candidate nearest to `word`, if one is near enough. A word from a client may be long: it is
/// compared only with candidates of about its length.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let len = word.chars().count();
    let near = candidates.into_iter().filter_map(|candidate| {
        let its = candidate.chars().count();
        let most = 2.max(its / 3);
        // A distance is at least the difference of the lengths.
        let distance = (its.abs_diff(len) <= most)
            .then(|| strsim::damerau_levenshtein(word, candidate))
            .filter(|distance| *distance <= most)?;
        // One that has no letter in common is no misspelling: `a`, `vm`.
        (distance < its.max(len)).then_some((distance, candidate))
    });
    near.min().map(|(_, candidate)| candidate)
}

/// " (did you mean 'x'?)", or nothing where no candidate is near.
pub fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, candidates).map_or_else(String::new, |c| format!(" (did you mean '{c}'?)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_near_candidates_are_suggested() {
        let known = ["polling", "threads", "peers"];
        assert_eq!(did_you_mean("poling", known), " (did you mean 'polling'?)");
        assert_eq!(did_you_mean("xyzzy", known), "");
        assert_eq!(did_you_mean("x", []), "");
        assert_eq!(did_you_mean("a", ["n", "vm"]), "");
        assert_eq!(did_you_mean("mv1", ["vm1"]), " (did you mean 'vm1'?)");
        assert_eq!(did_you_mean("pollling-at-length", ["polling", "polling-at-length"]).len(), 36);
    }

    /// Compared with all, this would take gigabytes.
    #[test]
    fn long_word_is_near_none() {
        let word = "polling".repeat(10_000_000);
        assert_eq!(nearest(&word, ["polling", "threads", &"polling".repeat(100)]), None);
    }
}
