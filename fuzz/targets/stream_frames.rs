//! See [`pvswitch_fuzz::stream_frames`]. Without cargo-fuzz: runs the files named on the command
//! line.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| pvswitch_fuzz::stream_frames::run(data));

#[cfg(not(fuzzing))]
fn main() {
    pvswitch_fuzz::replay(pvswitch_fuzz::stream_frames::run);
}
