use std::path::Path;

use super::*;
use crate::file::File;

fn file(text: &str) -> Result<(), String> {
    File::parse(Path::new("x.toml"), text).map(drop).map_err(|error| error.to_string())
}

#[test]
fn the_schema_is_one() {
    assert!(jsonschema::meta::is_valid(&schema()));
}

#[test]
fn the_schema_rejects_what_the_program_rejects() {
    for text in [
        "pol = \"event\"\n",
        "poll = \"evnt\"\n",
        "poll = 1\n",
        "workers = 64\n",
        "workers = true\n",
        "placement = \"balance\"\n",
        "cpus = [1, []]\n",
        "static = 1\n",
        "[static]\nx = \"a\"\n",
        "port = 1\n",
        "[port.a]\nsocket = \"/a\"\n",
        "[port.a]\nkind = \"vhost-usr\"\n",
        "[port.a]\nkind = \"tap\"\n",
        "[port.a]\nkind = \"null\"\nsocket = \"/a\"\n",
        "[port.a]\nkind = \"xen\"\nvif = \"x\"\n",
        "[port.a]\nkind = \"null\"\n\"poll/16\" = \"spin\"\n",
        "[port.a]\nkind = \"null\"\nweight = 0\n",
        "[port.a]\nkind = \"null\"\nlimit-held-bytes = \"4X\"\n",
        "[port.a]\nkind = \"xen\"\nvif = \"auto\"\nsmart_poll = 1\n",
        "[port.'a/b']\nkind = \"null\"\n",
        "[port.'..']\nkind = \"null\"\n",
        "[port.'-a']\nkind = \"null\"\n",
    ] {
        assert!(!errors(text).is_empty(), "the schema accepts {text}");
        assert!(file(text).is_err(), "the program accepts {text}");
    }
}

#[test]
fn the_schema_accepts_every_form_of_a_value() {
    for text in [
        "",
        "workers = \"2\"\ncpus = 1\nhttp = 9000\n",
        "cpus = [\"1\", 2]\ncontrol = \"/run/x\"\n",
        "[port.a]\nkind = \"xen\"\nvif = \"auto\"\nsmart_poll = true\n",
        "[port.a]\nkind = \"null\"\nlimit-held-bytes = \"4k\"\n\"poll/15\" = \"napi:5\"\n",
        "[static]\n\"02:00:00:00:00:01/5\" = \"a\"\n",
    ] {
        // Queue 15 does not exist: the schema does not count queues.
        let wrong = file(text).err().filter(|error| !error.contains("poll/15"));
        assert_eq!((errors(text), wrong), (Vec::new(), None), "{text}");
    }
}
