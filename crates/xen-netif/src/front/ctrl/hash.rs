//! What is asked so that the back end spreads what we receive by a hash of ours.
//!
//! ```text
//!   algorithm ─▶ which types? ─▶ key ─▶ how long a table? ─▶ its length ─▶ table ─▶ types
//!       ▲                                                                            │
//!       └──────────────── a refusal of anything but this: none ◀─────────────────────┘
//! ```
//! Types come last: before there are any nothing is hashed, and so none by half of what we want. A
//! back end that does not go all the way has its choice of queues back.

use std::hash::{BuildHasher, Hasher, RandomState};

use ring::xen::ctrl_type;

use crate::port::hash::{KEY_LEN_MAX, MAPPING_MAX, algorithm, hash_type};

/// What was answered so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Algorithm,
    Types,
    Key,
    Longest,
    Length,
    Table,
    On,
    /// The algorithm is to be taken back.
    Undo,
    Over,
}

/// A request, and what is to lie in the page that it names.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    /// Its type.
    pub kind: u16,
    /// Its data; with `page`, behind the grant's reference.
    pub data: u32,
    /// What goes into the page; empty: none is named.
    pub page: Vec<u8>,
}

/// The orders of one vif.
#[derive(Debug)]
pub struct Hashing {
    stage: Stage,
    key: [u8; KEY_LEN_MAX],
    queues: u32,
    /// The types that we asked of the back end.
    types: u32,
    table: u32,
    /// The next answer is to an order of before.
    deaf: bool,
    /// Whether the back end took them all.
    pub is_on: bool,
}

impl Hashing {
    /// Over so many queues, by a key of its own: who could guess it could send everything to one.
    pub fn new(queues: u32) -> Self {
        let mut key = [0; KEY_LEN_MAX];
        for part in key.chunks_mut(8) {
            let random = RandomState::new().build_hasher().finish();
            part.copy_from_slice(&random.to_le_bytes()[..part.len()]);
        }
        Self { stage: Stage::default(), key, queues, types: 0, table: 0, deaf: false, is_on: false }
    }

    /// From the first order on. `on_its_way`: one of before was not answered yet.
    pub fn begin(&mut self, on_its_way: bool) {
        (self.stage, self.is_on, self.deaf) = (Stage::Algorithm, false, on_its_way);
    }

    /// What to ask next.
    pub fn next(&self) -> Option<Order> {
        let order = |kind, data| Some(Order { kind, data, page: Vec::new() });
        match self.stage {
            Stage::Algorithm => order(ctrl_type::SET_HASH_ALGORITHM, algorithm::TOEPLITZ.into()),
            Stage::Types => order(ctrl_type::GET_HASH_FLAGS, 0),
            Stage::Key => {
                let (kind, data) = (ctrl_type::SET_HASH_KEY, KEY_LEN_MAX as u32);
                Some(Order { kind, data, page: self.key.into() })
            }
            Stage::Longest => order(ctrl_type::GET_HASH_MAPPING_SIZE, 0),
            Stage::Length => order(ctrl_type::SET_HASH_MAPPING_SIZE, self.table),
            Stage::Table => {
                let entries = (0..self.table).map(|n| n % self.queues);
                let page = entries.flat_map(u32::to_le_bytes).collect();
                Some(Order { kind: ctrl_type::SET_HASH_MAPPING, data: self.table, page })
            }
            Stage::On => order(ctrl_type::SET_HASH_FLAGS, self.types),
            Stage::Undo => order(ctrl_type::SET_HASH_ALGORITHM, algorithm::NONE.into()),
            Stage::Over => None,
        }
    }

    /// The answer to it; `None`: a refusal. Whether all goes on as we wanted.
    pub fn hear(&mut self, data: Option<u32>) -> bool {
        if std::mem::take(&mut self.deaf) {
            return true;
        }
        let Some(data) = data else {
            let was_first = matches!(self.stage, Stage::Algorithm | Stage::Undo);
            self.stage = if was_first { Stage::Over } else { Stage::Undo };
            return false;
        };
        self.stage = match self.stage {
            Stage::Algorithm => Stage::Types,
            Stage::Types => {
                self.types = data & hash_type::ALL;
                if self.types == 0 {
                    self.stage = Stage::Undo;
                    return false;
                }
                Stage::Key
            }
            Stage::Key => Stage::Longest,
            Stage::Longest => {
                // As long for one queue as for another; without a table it is a remainder.
                let longest = data.min(MAPPING_MAX as u32);
                self.table = longest - longest % self.queues;
                Stage::Length
            }
            Stage::Length if self.table > 0 => Stage::Table,
            Stage::Length | Stage::Table => Stage::On,
            Stage::On => {
                self.is_on = true;
                Stage::Over
            }
            Stage::Undo | Stage::Over => Stage::Over,
        };
        true
    }
}
