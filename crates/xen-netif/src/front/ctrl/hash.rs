//! Requests for a hash by which the back end spreads received frames.
//!
//! ```text
//!   algorithm ─▶ which types? ─▶ key ─▶ how long a table? ─▶ its length ─▶ table ─▶ types
//!       ▲                                                                            │
//!       └──────────── a refusal of any other request: algorithm NONE ◀───────────────┘
//! ```
//! Types come last: nothing is hashed before they are set, so never by an incomplete configuration.
//! If a request is refused, the back end selects queues itself.

use std::hash::{BuildHasher, Hasher, RandomState};

use ring::xen::ctrl_type;

use crate::port::hash::{KEY_LEN_MAX, MAPPING_MAX, algorithm, hash_type};

/// The next request.
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
    /// Resets the algorithm.
    Undo,
    Over,
}

/// A request, and the contents of the page that it names.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    /// Its type.
    pub kind: u16,
    /// Its data, after the grant reference if there is a page.
    pub data: u32,
    /// Contents of the page; empty: no page.
    pub page: Vec<u8>,
}

/// The hash configuration of one vif.
#[derive(Debug)]
pub struct Hashing {
    stage: Stage,
    key: [u8; KEY_LEN_MAX],
    queues: u32,
    /// The types requested.
    types: u32,
    table: u32,
    /// Whether the next response belongs to an earlier configuration.
    ignores_next: bool,
    /// Whether the configuration is complete.
    pub is_on: bool,
}

impl Hashing {
    /// Over this many queues, by a random key: with a known key, a sender could direct all frames
    /// to one queue.
    pub fn new(queues: u32) -> Self {
        let mut key = [0; KEY_LEN_MAX];
        for part in key.chunks_mut(8) {
            let random = RandomState::new().build_hasher().finish();
            part.copy_from_slice(&random.to_le_bytes()[..part.len()]);
        }
        let stage = Stage::default();
        Self { stage, key, queues, types: 0, table: 0, ignores_next: false, is_on: false }
    }

    /// Starts again. `pending`: a response to an earlier request is outstanding.
    pub fn begin(&mut self, pending: bool) {
        (self.stage, self.is_on, self.ignores_next) = (Stage::Algorithm, false, pending);
    }

    /// The next request.
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

    /// Handles a response; `None`: a refusal. Returns whether the configuration continues.
    pub fn handle_response(&mut self, data: Option<u32>) -> bool {
        if std::mem::take(&mut self.ignores_next) {
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
                // A multiple of the number of queues; without a table, the remainder is used.
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
