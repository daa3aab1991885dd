//! What a machine is started with.

use std::fs::File;
use std::path::Path;

use super::agent::Setup;
use super::image::Image;

/// What a machine is made of; its process has all files here open.
pub(super) struct Plan<'a> {
    /// The program that is its first process.
    pub agent: &'a Path,
    /// What QEMU boots.
    pub image: Option<&'a Image>,
    /// Of the switch's port.
    pub socket: &'a str,
    /// Of its channels.
    pub folder: &'a Path,
    /// Takes what its kernel says.
    pub console: File,
    /// To it and from it, of each channel.
    pub channels: Vec<[File; 2]>,
    pub setup: Setup,
}
