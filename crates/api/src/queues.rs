//! A setting of all queue pairs of a port, with overrides for single ones.

/// Most queue pairs of any port.
pub const QUEUES_MAX: u16 = 16;

/// A value for all queues, unless default, and overrides for single queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerQueue<T> {
    all: Option<T>,
    one: [Option<T>; QUEUES_MAX as usize],
}

impl<T> Default for PerQueue<T> {
    fn default() -> Self {
        Self { all: None, one: [const { None }; QUEUES_MAX as usize] }
    }
}

/// The same value for all queues.
impl<T> From<T> for PerQueue<T> {
    fn from(value: T) -> Self {
        Self { all: Some(value), ..Self::default() }
    }
}

impl<T: Copy> PerQueue<T> {
    /// Sets the value of one queue, below [`QUEUES_MAX`].
    pub fn set_one(&mut self, queue: usize, value: T) {
        self.one[queue] = Some(value);
    }

    /// The value of all queues without an override.
    pub fn all(&self) -> Option<T> {
        self.all
    }

    /// The value of a queue; `None`: the default.
    pub fn of(&self, queue: usize) -> Option<T> {
        self.one.get(queue).copied().flatten().or(self.all)
    }

    /// Sets the values that `later` has; others are unchanged.
    pub fn extend(&mut self, later: &Self) {
        self.all = later.all.or(self.all);
        later.ones().for_each(|(queue, value)| self.set_one(queue, value));
    }

    /// Overrides: queue and value.
    pub fn ones(&self) -> impl Iterator<Item = (usize, T)> + '_ {
        self.one.iter().enumerate().filter_map(|(queue, value)| Some((queue, (*value)?)))
    }

    /// Rejects overrides for queues that do not exist; `queues` is the number of queues.
    ///
    /// # Errors
    /// There is one; the error names it, and the queues that exist.
    pub fn check(&self, key: &str, queues: u16) -> Result<(), String> {
        match self.ones().find(|(queue, _)| *queue >= usize::from(queues)) {
            None => Ok(()),
            Some((queue, _)) => Err(no_queue(key, queue, queues)),
        }
    }
}

/// Parses the number of a queue pair in `WORD/QUEUE`.
///
/// # Errors
/// It is out of range; the error says what to write.
pub fn queue_number(word: &str, queue: &str) -> Result<usize, String> {
    let number = queue.parse().ok().filter(|n| *n < usize::from(QUEUES_MAX));
    number.ok_or_else(|| {
        let last = QUEUES_MAX - 1;
        format!("use {word}/QUEUE, a queue pair's number, 0 to {last}")
    })
}

/// Error for option `key` of a nonexistent queue; `queues` is the number of queues.
pub fn no_queue(key: &str, queue: usize, queues: u16) -> String {
    if queues == 1 {
        return format!(
            "{key}/{queue}: there is one queue pair, number 0, unless `queues` sets more"
        );
    }
    let last = queues - 1;
    format!("{key}/{queue}: there are {queues} queue pairs, 0 to {last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_its_override_or_the_value_of_all() {
        let mut values = PerQueue::from(1);
        values.set_one(2, 5);
        assert_eq!([0, 2, 99].map(|queue| values.of(queue)), [Some(1), Some(5), Some(1)]);
        let mut later = PerQueue::default();
        later.set_one(0, 7);
        values.extend(&later);
        assert_eq!((values.all(), values.of(0)), (Some(1), Some(7)));
        values.extend(&PerQueue::from(3));
        assert_eq!((values.of(1), values.of(2)), (Some(3), Some(5)));
        assert_eq!(values.check("poll", 3), Ok(()));
        let error = values.check("poll", 2).unwrap_err();
        assert!(error.contains("poll/2: there are 2 queue pairs, 0 to 1"), "{error}");
        let error = values.check("poll", 1).unwrap_err();
        assert!(error.contains("poll/2: there is one queue pair, number 0"), "{error}");
        for queue in ["16", "x", "-1", ""] {
            let error = queue_number("poll", queue).unwrap_err();
            assert_eq!(error, "use poll/QUEUE, a queue pair's number, 0 to 15", "{queue}");
        }
    }
}
