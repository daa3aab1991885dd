//! The back half of a vif: its handshake over xenstore.
