//! All operations.

use super::field::{Field, Form, Place};
use super::{Operation, Reply, Right, Server};

const fn field(name: &'static str, place: Place, form: Form, help: &'static str) -> Field {
    Field { name, place, form, help }
}

const NAME: Field = field("name", Place::Path, Form::Port, "name of the port");
const QUEUE: Field = field("queue", Place::Path, Form::Queue, "number of the queue pair");
const MAC: Field = field("mac", Place::Path, Form::Mac, "the address");
const VLAN: Field = field("vlan", Place::Query, Form::Vlan, "VLAN id, 0 for untagged");
const PORT: Field = field("port", Place::Body, Form::Port, "name of its port");
const DRY_RUN: Field = field("dry_run", Place::Query, Form::Flag, "only report the difference");
const SECONDS: Field =
    field("seconds", Place::Query, Form::Seconds, "time between the two samples of the counters");
const PROGRAM: Field =
    field("program", Place::Body, Form::Program, "the program; none: that of the running switch");

const fn whole(name: &'static str, schema: &'static str, help: &'static str) -> Field {
    field(name, Place::Whole, Form::Object(schema), help)
}

const NEW: Field = whole("port", "Port", "kind and options, as in the configuration file");
const OF_PORT: Field = whole("settings", "PortSettings", "options and their new values");
const OF_QUEUE: Field = whole("settings", "QueueSettings", "options and their new values");
const OF_SWITCH: Field = whole("settings", "Settings", "settings and their new values");
const OF_PAIR: Field = whole("settings", "PairSettings", "settings and their new values");

/// An operation of a switch without fields, for everyone who may connect.
const fn get(
    name: &'static str,
    path: &'static str,
    schema: &'static str,
    help: &'static str,
) -> Operation {
    Operation {
        name,
        method: "GET",
        path,
        server: Server::Switch,
        right: Right::Read,
        help,
        fields: &[],
        reply: Reply::Json(schema),
        errors: &[],
    }
}

/// An operation of a switch that changes it and returns nothing.
const fn change(
    name: &'static str,
    method: &'static str,
    path: &'static str,
    fields: &'static [Field],
    help: &'static str,
) -> Operation {
    let operation = get(name, path, "", help);
    Operation { method, right: Right::Change, fields, reply: Reply::Nothing, ..operation }
}

/// All operations.
pub const OPERATIONS: &[Operation] = &[
    get("show", "/v1/status", "Status", "Returns the state of the switch and of its ports"),
    Operation {
        server: Server::Both,
        ..get("stats", "/v1/stats", "Stats", "Returns all counters of ports, queues and workers")
    },
    get("ports", "/v1/ports", "Ports", "Returns the state of all ports"),
    Operation {
        fields: &[NAME],
        errors: &[404],
        ..get("port", "/v1/ports/{name}", "PortStatus", "Returns the state of a port")
    },
    Operation {
        reply: Reply::Created,
        errors: &[409, 413, 415, 422],
        ..change(
            "add-port",
            "PUT",
            "/v1/ports/{name}",
            &[NAME, NEW],
            "Adds a port; one of this name must not exist",
        )
    },
    Operation {
        reply: Reply::Changed,
        errors: &[404, 413, 415, 422],
        ..change(
            "set-port",
            "PATCH",
            "/v1/ports/{name}",
            &[NAME, OF_PORT],
            "Changes options of a port: all or, if one is invalid, none",
        )
    },
    Operation {
        errors: &[404],
        ..change("del-port", "DELETE", "/v1/ports/{name}", &[NAME], "Removes a port")
    },
    Operation {
        fields: &[NAME],
        errors: &[404],
        ..get("port-stats", "/v1/ports/{name}/stats", "PortStats", "Returns the counters of a port")
    },
    Operation {
        fields: &[NAME, SECONDS],
        errors: &[404],
        ..get(
            "why",
            "/v1/ports/{name}/why",
            "Why",
            "Returns why frames do not arrive at a port, or from it, after `seconds`",
        )
    },
    Operation {
        errors: &[404, 413, 415, 422],
        ..change(
            "set-queue",
            "PATCH",
            "/v1/ports/{name}/queues/{queue}",
            &[NAME, QUEUE, OF_QUEUE],
            "Changes options of a queue pair of a port",
        )
    },
    Operation {
        reply: Reply::Json("Drain"),
        errors: &[404],
        ..change(
            "drain",
            "PUT",
            "/v1/ports/{name}/drain",
            &[NAME],
            "Stops taking frames from a port; repeat it until the port is drained",
        )
    },
    Operation {
        reply: Reply::Json("Drain"),
        errors: &[404],
        ..change(
            "resume",
            "DELETE",
            "/v1/ports/{name}/drain",
            &[NAME],
            "Resumes taking frames from a port",
        )
    },
    Operation {
        right: Right::Change,
        fields: &[NAME],
        reply: Reply::Capture,
        errors: &[404, 409],
        ..get(
            "capture",
            "/v1/ports/{name}/capture",
            "",
            "Returns a port's frames as pcapng until the client shuts down its side",
        )
    },
    get("workers", "/v1/workers", "Workers", "Returns the counters of all workers"),
    get("accounts", "/v1/accounts", "Accounts", "Returns what ports use of their limits"),
    get("fdb", "/v1/fdb", "Fdb", "Returns all addresses and their ports"),
    Operation {
        errors: &[404, 413, 415, 422],
        ..change(
            "fdb-add",
            "PUT",
            "/v1/fdb/{mac}",
            &[MAC, VLAN, PORT],
            "Sets a static address; it replaces an earlier entry",
        )
    },
    Operation {
        errors: &[404],
        ..change("fdb-del", "DELETE", "/v1/fdb/{mac}", &[MAC, VLAN], "Removes an address")
    },
    Operation {
        server: Server::Both,
        errors: &[413, 415, 422],
        ..change(
            "set",
            "PATCH",
            "/v1/settings",
            &[OF_SWITCH],
            "Changes settings of the switch and of all ports; of a guest: of all queue pairs",
        )
    },
    Operation {
        server: Server::Guest,
        errors: &[404, 413, 415, 422],
        ..change(
            "set-pair",
            "PATCH",
            "/v1/queues/{queue}",
            &[QUEUE, OF_PAIR],
            "Changes settings of a queue pair of a guest",
        )
    },
    Operation {
        right: Right::Change,
        errors: &[409],
        ..get("config", "/v1/config", "Config", "Returns the running configuration as TOML")
    },
    Operation {
        reply: Reply::Json("Reload"),
        errors: &[409, 422],
        ..change(
            "reload",
            "POST",
            "/v1/reload",
            &[DRY_RUN],
            "Reads the configuration file again and applies the difference, all or nothing",
        )
    },
    Operation {
        right: Right::Own,
        reply: Reply::Json("Upgrade"),
        errors: &[413, 415, 422],
        ..change(
            "upgrade",
            "POST",
            "/v1/upgrade",
            &[PROGRAM],
            "Replaces the switch process; guests stay connected",
        )
    },
    change("shutdown", "POST", "/v1/shutdown", &[], "Stops the switch"),
    Operation {
        reply: Reply::Events,
        ..get("events", "/v1/events", "", "Returns events as they happen, as server-sent events")
    },
    get("last-events", "/v1/events/last", "Events", "Returns the last events, the latest last"),
    Operation {
        server: Server::Both,
        ..get("openapi", "/openapi.json", "Document", "Returns the description of this interface")
    },
];
