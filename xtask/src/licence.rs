//! Licence expressions (SPDX, or the older `MIT/Apache-2.0`): whether the terms are permissive.

/// Licences that require at most a notice.
const PERMISSIVE: [&str; 14] = [
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-1-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Zlib",
    "CC0-1.0",
    "0BSD",
    "BSL-1.0",
];
/// Public domain dedications.
const DEDICATIONS: [&str; 1] = ["Unlicense"];

/// Whether an expression can be satisfied by permissive licences only. `None`: invalid expression.
pub fn is_permissive(expression: &str) -> Option<bool> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let permissive = any(&words, &mut at)?;
    (at == words.len()).then_some(permissive)
}

fn any(words: &[&str], at: &mut usize) -> Option<bool> {
    let mut permissive = all(words, at)?;
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        permissive |= all(words, at)?;
    }
    Some(permissive)
}

fn all(words: &[&str], at: &mut usize) -> Option<bool> {
    let mut permissive = one(words, at)?;
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        permissive &= one(words, at)?;
    }
    Some(permissive)
}

fn one(words: &[&str], at: &mut usize) -> Option<bool> {
    let word = *words.get(*at)?;
    *at += 1;
    if word == "(" {
        let permissive = any(words, at)?;
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return closed.then_some(permissive);
    }
    if [")", "OR", "AND", "WITH"].contains(&word) {
        return None;
    }
    let mut name = word.to_owned();
    if words.get(*at) == Some(&"WITH") {
        name = format!("{word} WITH {}", words.get(*at + 1)?);
        *at += 2;
    }
    Some(PERMISSIVE.contains(&name.as_str()) || DEDICATIONS.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::{DEDICATIONS, PERMISSIVE, is_permissive};

    #[test]
    fn cargo_deny_permits_the_same_licences() {
        let config = std::fs::read_to_string(crate::root().join("deny.toml")).unwrap();
        let mut permitted = crate::tidy::packages::array(&config, "allow");
        let mut ours = [&PERMISSIVE[..], &DEDICATIONS].concat();
        permitted.sort_unstable();
        ours.sort_unstable();
        assert_eq!(permitted, ours);
    }

    #[test]
    fn expressions_of_crates_in_use() {
        for good in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
            "GPL-3.0 OR BSD-3-Clause",
            "Unlicense OR MIT",
        ] {
            assert_eq!(is_permissive(good), Some(true), "{good}");
        }
        for bad in ["GPL-3.0-only", "MIT AND GPL-2.0", "MIT AND (MPL-2.0 OR LGPL-3.0)"] {
            assert_eq!(is_permissive(bad), Some(false), "{bad}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT Apache-2.0", "OR MIT", "MIT WITH"] {
            assert_eq!(is_permissive(broken), None, "{broken}");
        }
    }
}
