//! What somebody may have meant.

/// " (did you mean 'x'?)", or nothing where no candidate is near.
pub fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    let scored = candidates.into_iter().map(|c| (strsim::damerau_levenshtein(word, c), c));
    let near = scored.min().filter(|(distance, c)| *distance <= 2.max(c.len() / 3));
    near.map_or_else(String::new, |(_, c)| format!(" (did you mean '{c}'?)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_near() {
        let known = ["polling", "threads", "peers"];
        assert_eq!(did_you_mean("poling", known), " (did you mean 'polling'?)");
        assert_eq!(did_you_mean("xyzzy", known), "");
        assert_eq!(did_you_mean("x", []), "");
    }
}
