//! System calls of this room.
