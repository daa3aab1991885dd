//! Suggestions for misspelt words.

/// The candidate nearest to `word`, if one is near enough.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.into_iter().map(|c| (strsim::damerau_levenshtein(word, c), c));
    // One that has no letter in common is no misspelling: `a`, `vm`.
    let is_near = |(distance, c): &(usize, &str)| {
        *distance <= 2.max(c.len() / 3) && *distance < c.len().max(word.len())
    };
    scored.min().filter(is_near).map(|(_, c)| c)
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
    }
}
