//! Rust source as text: its code without comments and strings, and words in it.

/// The code of `source`: comments, strings and characters blanked out, lines kept.
pub fn code_of(source: &str) -> String {
    let mut rest = source;
    let mut code = String::with_capacity(source.len());
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' | 'b' | 'c' if !code.ends_with(is_word) => raw_string(rest).unwrap_or(0),
            '\'' => character(rest),
            _ => 0,
        };
        if len == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.extend(rest[..len].chars().filter(|c| *c == '\n'));
            code.push(' ');
            rest = &rest[len..];
        }
    }
    code
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of a string literal that begins at its quote.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of `r"..."`, `br#"..."#` and similar; `None`: not a raw string.
fn raw_string(text: &str) -> Option<usize> {
    let body = text.strip_prefix(['b', 'c']).unwrap_or(text).strip_prefix('r')?;
    let hashes = body.len() - body.trim_start_matches('#').len();
    let open = text.len() - body.len() + hashes;
    text[open..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = text[open + 1..].find(&close).map_or(text.len(), |at| open + 1 + at + close.len());
    Some(end)
}

/// Length of a character literal; 0 for a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let from = at + escaped.len_utf8();
            text[from..].find('\'').map_or(text.len(), |end| from + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `line` contains `word` as a whole word.
pub fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let joins = |edge: Option<char>, next: Option<char>| {
            edge.is_some_and(is_word) && next.is_some_and(is_word)
        };
        !joins(word.chars().next(), before) && !joins(word.chars().next_back(), after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        let source = "a // unsafe\nb /* x /* y */ unsafe */ c \"un\\\"safe\" d r#\"un\"safe\"# e \
                      '\\'' '\"' f<'a>(\"s\")\n\"two\nlines\" g\n";
        let code = code_of(source);
        assert!(!code.contains("safe") && !code.contains("two"), "{code}");
        for kept in ["a ", "b ", " c ", " d ", " e ", " f<'a>(", " g"] {
            assert!(code.contains(kept), "{kept:?} in {code:?}");
        }
        assert_eq!(code.lines().count(), source.lines().count());
    }

    #[test]
    fn only_whole_words_match() {
        assert!(has_word("unsafe { x }", "unsafe") && has_word("}unsafe", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe") && !has_word("an_unsafe", "unsafe"));
        assert!(has_word("let x = vec!(y);", "vec!") && !has_word("my_vec!(y)", "vec!"));
    }
}
