//! Parameters of functions: none is a tuple that the signature takes apart.
//!
//! Such a tuple lowers the count of parameters for a lint, and takes their names from the caller.

use super::{Rule, Violation, violation};

/// Finds parameters that are tuple patterns, of functions, not of closures. `code` is without
/// comments and strings.
pub fn check(name: &str, code: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let joins = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let Some(open) = (!joins).then(|| opening(code, at + 3)).flatten() else { continue };
        for (start, parameter) in parameters(code, open) {
            if is_tuple(parameter) {
                let line = code[..start].matches('\n').count() + 1;
                let what = "a tuple of parameters: use a struct with named fields, a type that \
                            holds them already, or fewer parameters";
                found.push(violation(Rule::Parameters, format!("{name}:{line}"), what));
            }
        }
    }
    found
}

/// The parenthesis that opens the parameters of a function whose name begins at `from`; `None`: no
/// function, such as the type `fn (u8)`.
fn opening(code: &str, from: usize) -> Option<usize> {
    let is_named = code[from..].starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut depth = Depth::default();
    code[from..].char_indices().take_while(|_| is_named).find_map(|(at, c)| {
        let opens = c == '(' && depth.level == 0;
        depth.pass(c);
        opens.then_some(from + at)
    })
}

/// The parameters after an opening parenthesis, each with its place.
fn parameters(code: &str, open: usize) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut depth, mut start) = (Depth::default(), open + 1);
    for (at, c) in code[open..].char_indices().map(|(at, c)| (open + at, c)) {
        depth.pass(c);
        if depth.level == 0 || depth.level == 1 && c == ',' {
            let before = &code[start..at];
            let blank = before.len() - before.trim_start().len();
            found.push((start + blank, before.trim()));
            start = at + 1;
        }
        if depth.level == 0 {
            break;
        }
    }
    found
}

fn is_tuple(parameter: &str) -> bool {
    let attribute = parameter.strip_prefix("#[").and_then(|rest| rest.split_once(']'));
    let pattern = attribute.map_or(parameter, |(_, rest)| rest.trim_start());
    pattern.trim_start_matches('&').starts_with('(')
}

/// Nesting of brackets.
#[derive(Default)]
struct Depth {
    level: usize,
    last: char,
}

impl Depth {
    fn pass(&mut self, c: char) {
        match c {
            '(' | '<' | '[' | '{' => self.level += 1,
            // An arrow.
            '>' if self.last == '-' => {}
            ')' | '>' | ']' | '}' => self.level = self.level.saturating_sub(1),
            _ => {}
        }
        self.last = c;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(code: &str) -> Vec<String> {
        check("a.rs", code).into_iter().map(|violation| violation.at).collect()
    }

    #[test]
    fn tuple_patterns_are_violations() {
        assert_eq!(lines("fn f((a, b): (u8, u8)) {}\n"), ["a.rs:1"]);
        assert_eq!(lines("fn f(\n    a: u8,\n    (b, c): (u8, &mut B),\n) {}\n"), ["a.rs:3"]);
        assert_eq!(lines("fn f<F: Fn(u8) -> (u8, u8)>(&self, f: F, &(b, c): &B) {}"), ["a.rs:1"]);
        assert_eq!(lines("fn f(#[cfg(x)] (a, b): (u8, u8), (c, d): C) {}"), ["a.rs:1", "a.rs:1"]);
    }

    #[test]
    fn tuple_types_and_closures_are_not() {
        for code in [
            "fn f() { g(|(a, b): (u8, u8)| a + b) }",
            "fn f(at: (u8, u8), of: impl FnMut((u8, u8), &[u8]) -> (u8, u8)) -> (u8, u8) {}",
            "fn f(a: BTreeMap<(u8, u8), u8>, Small { b, c }: Small, [d, e]: [u8; 2]) {}",
            "struct A { of: fn ((u8, u8)) }",
            "let defn = turn (1, 2);",
        ] {
            assert_eq!(lines(code), [""; 0], "{code}");
        }
    }
}
