//! See [`pvswitch_fuzz::ring_race`]. Without cargo-fuzz: runs the files named on the command line.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| pvswitch_fuzz::ring_race::run(data));

#[cfg(not(fuzzing))]
fn main() {
    use pvswitch_fuzz::ring_race::{run, seeds};
    pvswitch_fuzz::replay(run, seeds);
}
