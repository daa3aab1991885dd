//! `bench forward` as a program.

#[path = "../forward.rs"]
mod forward;

fn main() {
    forward::main();
}
