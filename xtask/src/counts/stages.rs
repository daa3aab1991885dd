//! Instructions and missed cache lines of a frame, by function.

use std::collections::{BTreeMap, HashMap};

/// Callgrind's options: a core's own cache for data, of 32 KiB, and a shared one.
pub const CACHES: [&str; 4] =
    ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64"];
/// Functions with less of a case's instructions are taken together.
const SHARE_LEAST: f64 = 0.01;

/// Own costs of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    instructions: f64,
    /// Lines that were not in the first cache, for reading or writing.
    lines: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.instructions += other.instructions;
        self.lines += other.lines;
    }
}

/// Own costs by function, of a file in callgrind's format; `None`: it has another one.
pub fn read(text: &str) -> Option<BTreeMap<String, Cost>> {
    let events = text.lines().find_map(|line| line.strip_prefix("events: "))?;
    let events: Vec<&str> = events.split_whitespace().collect();
    let at = |name: &str| events.iter().position(|event| *event == name);
    let (instructions, lines) = (at("Ir")?, [at("D1mr")?, at("D1mw")?]);
    let (mut names, mut costs) = (HashMap::new(), BTreeMap::<String, Cost>::new());
    let (mut function, mut is_call) = (String::new(), false);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            // `(7) name` the first time, `(7)` from then on.
            let (id, name) = name.split_once(' ').unwrap_or((name, ""));
            if !name.is_empty() {
                names.insert(id, name);
            }
            function = names.get(id).copied().unwrap_or(id).to_string();
        } else if let Some(name) = line.strip_prefix("cfn=") {
            if let Some((id, name)) = name.split_once(' ') {
                names.insert(id, name);
            }
        } else if line.starts_with("calls=") {
            // The next line is the cost of what was called.
            is_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            if std::mem::take(&mut is_call) {
                continue;
            }
            let numbers = line.split_whitespace().skip(1);
            let numbers: Vec<f64> = numbers.map(|n| n.parse().unwrap_or(0.0)).collect();
            let of = |at: usize| numbers.get(at).copied().unwrap_or(0.0);
            let cost = Cost { instructions: of(instructions), lines: of(lines[0]) + of(lines[1]) };
            *costs.entry(function.clone()).or_default() += cost;
        }
    }
    Some(costs)
}

/// The costs of each frame as a Markdown table, the largest first.
pub fn table(name: &str, costs: BTreeMap<String, Cost>, frames: f64) -> String {
    let mut all = Cost::default();
    costs.values().for_each(|cost| all += *cost);
    let (mut main, mut rest) = (Vec::new(), Cost::default());
    for (function, cost) in costs {
        if cost.instructions >= SHARE_LEAST * all.instructions {
            main.push((short(&function), cost));
        } else {
            rest += cost;
        }
    }
    main.sort_by(|(_, a), (_, b)| b.instructions.total_cmp(&a.instructions));
    main.extend([("all others".to_string(), rest), ("together".to_string(), all)]);
    let row = |(function, cost): &(String, Cost)| {
        let Cost { instructions, lines } = cost;
        format!("| {function} | {:.1} | {:.2} |\n", instructions / frames, lines / frames)
    };
    let rows: String = main.iter().map(row).collect();
    format!("| {name} | instructions | lines missed |\n|---|---|---|\n{rows}")
}

/// A function's name without the hash behind it, and without parameters of types.
fn short(function: &str) -> String {
    let (mut name, mut depth) = (String::new(), 0_u32);
    let plain = function.rsplit_once("::h").filter(|(_, hash)| hash.len() == 16);
    for c in plain.map_or(function, |(name, _)| name).chars() {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            '|' => name.push('/'),
            _ if depth < 2 => name.push(c),
            _ => {}
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\nevents: Ir Dr Dw I1mr D1mr D1mw\n\n\
        fl=(1) a.rs\nfn=(1) switch::forward::h0123456789abcdef\n10 100 5 5 0 2 1\n+3 50\n\
        cfn=(2) memcpy\ncalls=7 0\n* 700 0 0 0 9 9\n\n\
        fl=(2)\nfn=(2)\n0 700 0 0 0 9 9\n\nfn=(1)\n-1 50\n";

    #[test]
    fn costs_of_calls_are_those_of_the_function_called() {
        let costs = read(TEXT).unwrap();
        let of = |name: &str| costs[name];
        assert_eq!(of("memcpy"), Cost { instructions: 700.0, lines: 18.0 });
        let forward = of("switch::forward::h0123456789abcdef");
        assert_eq!(forward, Cost { instructions: 200.0, lines: 3.0 });
        assert!(read("events: Ir\n").is_none() && read("").is_none());
    }

    #[test]
    fn a_table_has_the_costs_of_a_frame() {
        let shown = table("split", read(TEXT).unwrap(), 10.0);
        assert!(shown.contains("| memcpy | 70.0 | 1.80 |\n| switch::forward | 20.0 | 0.30 |"));
        assert!(shown.ends_with("| all others | 0.0 | 0.00 |\n| together | 90.0 | 2.10 |\n"));
    }

    #[test]
    fn names_lose_their_hash_and_deep_parameters() {
        assert_eq!(short("a::b::h0123456789abcdef"), "a::b");
        assert_eq!(short("<a::B as c::D<E<F>>>::g"), "a::B as c::D::g");
    }
}
