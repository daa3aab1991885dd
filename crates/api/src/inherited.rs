//! Descriptors that the parent process passed, `fd=NAME` in a setting.

/// Prefix of a descriptor that the parent process passed; the rest is its name.
pub const INHERITED: &str = "fd=";
/// Longest name of an inherited descriptor, as systemd has it.
const FD_NAME_MAX: usize = 255;

/// The name in `fd=NAME`; `None`: it is something else.
///
/// # Errors
/// The name is invalid; the error gives the rule.
pub fn inherited(text: &str) -> Option<Result<&str, String>> {
    let name = text.strip_prefix(INHERITED)?;
    let legal = |c: char| c.is_ascii_graphic() && !":,".contains(c);
    if (1..=FD_NAME_MAX).contains(&name.len()) && name.chars().all(legal) {
        return Some(Ok(name));
    }
    Some(Err(format!(
        "fd={}: a descriptor's name has 1 to {FD_NAME_MAX} characters, without white space, ':' \
         and ','; use FileDescriptorName= of the socket unit",
        name.escape_debug()
    )))
}
