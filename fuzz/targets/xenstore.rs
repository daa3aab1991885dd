//! See [`pvswitch_fuzz::xenstore`]. Without cargo-fuzz: runs the files named on the command line.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| pvswitch_fuzz::xenstore::run(data));

#[cfg(not(fuzzing))]
fn main() {
    use pvswitch_fuzz::xenstore::{run, seeds};
    pvswitch_fuzz::replay(run, seeds);
}
