//! The text forms of a poll, call or kick policy.
//!
//! Here a policy is text; the switch, which implements policies, parses it into a value.

/// Arguments of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Args {
    /// Nothing.
    None,
    /// A number, or nothing.
    Maybe(Number),
    /// Two numbers.
    Two(Number, Number),
    /// A number, divided by the number of pending frames.
    Pending(Number),
}

/// A numeric argument of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// Its name in messages.
    pub what: &'static str,
    /// Minimum.
    pub min: u32,
    /// Maximum.
    pub max: u32,
}

/// One form of policy.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// Syntax, as shown to operators.
    pub form: &'static str,
    /// The word before the colon.
    pub word: &'static str,
    /// The arguments after the colon.
    pub args: Args,
    /// Text: when a queue is polled under it.
    pub polls: &'static str,
    /// Text: when a guest is called under it.
    pub calls: &'static str,
    /// Text: what it is suited for.
    pub good_for: &'static str,
}

const fn number(what: &'static str, min: u32, max: u32) -> Number {
    Number { what, min, max }
}

/// A second, in us.
const SECOND_US: u32 = 1_000_000;

/// All forms.
pub const FORMS: [Form; 7] = [
    Form {
        form: "event",
        word: "event",
        args: Args::None,
        polls: "when its guest kicks; kicks are never suppressed",
        calls: "once per burst, unless it suppresses calls",
        good_for: "many guests with little traffic",
    },
    Form {
        form: "napi[:BUDGET]",
        word: "napi",
        args: Args::Maybe(number("napi budget", 1, 64)),
        polls: "after a kick, BUDGET frames (64) per round, until a round finds fewer; kicks are \
                suppressed meanwhile",
        calls: "as `event`",
        good_for: "",
    },
    Form {
        form: "timer[:HZ]",
        word: "timer",
        args: Args::Maybe(number("timer frequency", 1, 20_000)),
        polls: "at fixed ticks (1000 Hz, up to 20,000), from a kick until 100 ms without a frame; \
                queues share ticks",
        calls: "at the next tick",
        good_for: "bulk traffic to guests whose interrupts are expensive",
    },
    Form {
        form: "coalesce:USECS,FRAMES",
        word: "coalesce",
        args: Args::Two(
            number("coalesce delay", 0, SECOND_US),
            number("coalesce frames", 1, 65_535),
        ),
        polls: "again after USECS, at once if FRAMES were found; armed if none was found",
        calls: "USECS after the first frame it was not notified of, or at FRAMES",
        good_for: "",
    },
    Form {
        form: "coalesce:USECS/pending",
        word: "coalesce",
        args: Args::Pending(number("coalesce delay", 0, SECOND_US)),
        polls: "again after USECS divided by the frames found",
        calls: "after USECS divided by the frames it was not notified of",
        good_for: "rows 1, 2, 5/pending of the original [study](studies.md)",
    },
    Form {
        form: "spin",
        word: "spin",
        args: Args::None,
        polls: "continuously",
        calls: "as `event`",
        good_for: "lowest latency, cores to spare",
    },
    Form {
        form: "adaptive[:LATENCY_US]",
        word: "adaptive",
        args: Args::Maybe(number("adaptive latency", 0, SECOND_US)),
        polls: "continuously, at intervals, or when kicked, whichever costs least \
                ([0008](design/0008-adaptive.md))",
        calls: "as `event`; while every round of the worker finds frames, and eight or more \
                arrive in LATENCY_US, once in that time or per 64 frames",
        good_for: "everything else",
    },
];

/// All forms, as messages list them.
pub fn forms() -> String {
    FORMS.map(|form| form.form).join(", ")
}

/// Checks the text of a policy.
///
/// # Errors
/// It is not a policy, or a number is out of range; the error says what to write.
pub fn check(text: &str) -> Result<(), String> {
    let unknown = || format!("unknown policy '{text}': use one of {}", forms());
    let (word, arg) = text.split_once(':').map_or((text, None), |(word, arg)| (word, Some(arg)));
    let within = |number: Number, text: &str| {
        let Number { what, min, max } = number;
        let valid = text.parse().is_ok_and(|n: u32| (min..=max).contains(&n));
        if valid { Ok(()) } else { Err(format!("{what} '{text}': use {min} to {max}")) }
    };
    for form in FORMS.iter().filter(|form| form.word == word) {
        match (form.args, arg) {
            (Args::None | Args::Maybe(_), None) => return Ok(()),
            (Args::Maybe(number), Some(arg)) => return within(number, arg),
            (Args::Two(first, second), Some(arg)) => {
                if let Some((one, two)) = arg.split_once(',') {
                    return within(first, one).and_then(|()| within(second, two));
                }
            }
            (Args::Pending(number), Some(arg)) => {
                if let Some(arg) = arg.strip_suffix("/pending") {
                    return within(number, arg);
                }
            }
            _ => {}
        }
    }
    Err(unknown())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_a_policy_and_numbers_have_bounds() {
        let good = [
            "event",
            "napi",
            "napi:64",
            "timer",
            "timer:20000",
            "coalesce:50,32",
            "coalesce:0,1",
            "coalesce:50/pending",
            "spin",
            "adaptive",
            "adaptive:0",
        ];
        for text in good {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        for (text, want) in [
            ("evnt", "unknown policy 'evnt': use one of event, napi[:BUDGET], timer[:HZ]"),
            ("event:1", "unknown policy"),
            ("", "unknown policy ''"),
            ("napi:0", "napi budget '0': use 1 to 64"),
            ("timer:20001", "timer frequency '20001': use 1 to 20000"),
            ("coalesce", "coalesce:USECS,FRAMES"),
            ("coalesce:5", "coalesce:USECS,FRAMES"),
            ("coalesce:5,0", "coalesce frames '0': use 1 to 65535"),
            ("coalesce:x/pending", "coalesce delay 'x': use 0 to 1000000"),
            ("adaptive:-1", "adaptive latency '-1': use 0 to 1000000"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
