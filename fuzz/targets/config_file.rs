//! See [`pvswitch_fuzz::config_file`]. Without cargo-fuzz: runs the files named on the command
//! line.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| pvswitch_fuzz::config_file::run(data));

#[cfg(not(fuzzing))]
fn main() {
    use pvswitch_fuzz::config_file::{run, seeds};
    pvswitch_fuzz::replay(run, seeds);
}
