//! Start parameters of a virtual machine.

use std::fs::File;
use std::path::Path;

use super::agent::Setup;
use super::image::Image;

/// Start parameters of a virtual machine; its process inherits the files.
pub(super) struct Plan<'a> {
    /// Path of its init.
    pub agent: &'a Path,
    /// Boot files; QEMU only.
    pub image: Option<&'a Image>,
    /// Socket of the switch's port.
    pub socket: &'a str,
    /// Folder of its channels.
    pub folder: &'a Path,
    /// Its kernel's console.
    pub console: File,
    /// Pipes to it and from it, of each channel.
    pub channels: Vec<[File; 2]>,
    /// Parameters of its init.
    pub setup: Setup,
}
