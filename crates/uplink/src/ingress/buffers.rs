//! Private buffers that frames are read into.

use std::io;

use shm::Private;

use super::{SLOTS, STRIDE};

/// Buffers of [`STRIDE`] bytes, by number. The first few may be in supplied memory.
pub(super) struct Buffers {
    own: Private,
    supplied: Private,
    /// Memory to use when no buffer is in use.
    next: Option<Private>,
}

impl Buffers {
    pub fn new() -> io::Result<Self> {
        Ok(Self { own: Private::plain(SLOTS * STRIDE)?, supplied: Private::default(), next: None })
    }

    /// Puts the first buffers into `memory`, from the next time that [none is in
    /// use](Self::settle).
    pub fn set_memory(&mut self, memory: Private) {
        self.next = Some(memory);
    }

    /// Switches to supplied memory; no buffer may be in use.
    #[inline]
    pub fn settle(&mut self) {
        if let Some(memory) = self.next.take() {
            self.supplied = memory;
        }
    }

    #[inline]
    pub fn of(&self, slot: usize) -> &[u8] {
        let at = slot * STRIDE;
        self.supplied.get(at..at + STRIDE).unwrap_or_else(|| &self.own[at..at + STRIDE])
    }

    #[inline]
    pub fn of_mut(&mut self, slot: usize) -> &mut [u8] {
        let at = slot * STRIDE;
        match self.supplied.get_mut(at..at + STRIDE) {
            Some(buffer) => buffer,
            None => &mut self.own[at..at + STRIDE],
        }
    }

    /// All buffers, in order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut [u8])> {
        let supplied = self.supplied.chunks_exact_mut(STRIDE);
        let own = self.own.chunks_exact_mut(STRIDE).skip(supplied.len());
        supplied.chain(own).take(SLOTS).enumerate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(buffers: &mut Buffers) -> Vec<u8> {
        let through_all: Vec<u8> = buffers.iter_mut().map(|(_, buffer)| buffer[0]).collect();
        let one_by_one: Vec<u8> = (0..SLOTS).map(|slot| buffers.of(slot)[0]).collect();
        assert_eq!(through_all, one_by_one);
        through_all
    }

    #[test]
    fn first_buffers_are_in_lent_memory_once_none_is_in_use() {
        let mut buffers = Buffers::new().unwrap();
        for slot in 0..SLOTS {
            buffers.of_mut(slot)[0] = slot as u8 + 1;
        }
        // Three whole ones, and an unused rest.
        let mut memory = Private::plain(4 * STRIDE - 1).unwrap();
        memory.fill(200);
        buffers.set_memory(memory);
        assert_eq!(numbers(&mut buffers)[..4], [1, 2, 3, 4]);
        buffers.settle();
        assert_eq!(numbers(&mut buffers)[..4], [200, 200, 200, 4]);
        assert_eq!(numbers(&mut buffers).len(), SLOTS);
        // More than the number of buffers.
        buffers.set_memory(Private::plain((SLOTS + 1) * STRIDE).unwrap());
        buffers.settle();
        assert_eq!(numbers(&mut buffers), [0; SLOTS]);
    }
}
