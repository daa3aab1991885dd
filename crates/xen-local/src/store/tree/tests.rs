use proptest::prelude::*;

use super::*;

const DOMID: u16 = 7;
const HOME: &str = "/home";

/// A change of one node.
#[derive(Clone, Debug)]
enum Step {
    Write(String),
    Rm(String),
    /// Domain 0 gives a node to this domain, before the transaction.
    Give(String, u16),
}

fn path() -> impl Strategy<Value = String> {
    proptest::collection::vec(0..3_u8, 1..4).prop_map(|names| {
        names.iter().fold(HOME.to_string(), |path, name| format!("{path}/{name}"))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => path().prop_map(Step::Write),
        2 => path().prop_map(Step::Rm),
        1 => (path(), prop_oneof![Just(DOMID), Just(0)]).prop_map(|(p, d)| Step::Give(p, d)),
    ]
}

fn view<'a>(tree: &'a mut Tree, transaction: &'a mut Transaction, domid: u16) -> View<'a> {
    View { tree, transaction, domid, limits: Limits::XENSTORED }
}

/// Runs one request as domain 0.
fn host(tree: &mut Tree, request: impl FnOnce(&mut View<'_>) -> Result<(), Errno>) {
    let mut transaction = Transaction::default();
    if request(&mut view(tree, &mut transaction, 0)).is_ok() {
        tree.commit(transaction, 0, Limits::XENSTORED).unwrap();
    }
}

fn own(domid: u16) -> Vec<Perm> {
    vec![Perm::new(Access::None, domid), Perm::new(Access::Both, DOMID)]
}

proptest! {
    /// The nodes counted while a transaction changes them are those that its domain owns after it;
    /// and each node is listed by its parent.
    #[test]
    fn owned_nodes_are_counted_as_they_change(
        rounds in proptest::collection::vec(proptest::collection::vec(step(), 1..12), 1..6),
    ) {
        let mut tree = Tree::new(&[Perm::new(Access::Read, 0)]);
        host(&mut tree, |view| view.mkdir(HOME));
        host(&mut tree, |view| view.set_perms(HOME, own(DOMID)));
        for round in rounds {
            for step in &round {
                if let Step::Give(path, domid) = step {
                    host(&mut tree, |view| view.set_perms(path, own(*domid)));
                }
            }
            let mut transaction = Transaction::default();
            let mut view = view(&mut tree, &mut transaction, DOMID);
            for step in &round {
                let _refused = match step {
                    Step::Write(path) => view.write(path, b"x"),
                    Step::Rm(path) => view.rm(path),
                    Step::Give(..) => Ok(()),
                };
            }
            let expected = tree.owned_with(&transaction, DOMID);
            tree.commit(transaction, DOMID, Limits::XENSTORED).unwrap();
            let owned = tree.nodes.values().filter(|node| node.owner() == DOMID).count();
            prop_assert_eq!((expected, tree.owned(DOMID)), (owned, owned));
            for path in tree.nodes.keys().filter(|path| *path != "/") {
                let up = parent(path).unwrap();
                let name = path.rsplit('/').next().unwrap();
                prop_assert!(tree.nodes[up].children.contains(name), "{} not in {}", name, up);
            }
        }
    }
}

/// A node that a transaction adds many children to is copied once.
#[test]
fn a_parent_is_copied_once_per_transaction() {
    let mut tree = Tree::new(&[Perm::new(Access::Read, 0)]);
    let mut transaction = Transaction::default();
    let mut view = view(&mut tree, &mut transaction, 0);
    let mut copies = BTreeSet::new();
    for n in 0..1000 {
        view.write(&format!("{HOME}/{n}"), b"").unwrap();
        copies.insert(view.transaction.replaced[HOME].as_ref().map(Arc::as_ptr));
    }
    assert_eq!(copies.len(), 1);
    assert_eq!(
        view.transaction.replaced[HOME].as_ref().map(|node| node.children.len()),
        Some(1000)
    );
}

/// A transaction's limit of nodes is that of its changes, too: they have one entry for each node.
#[test]
fn node_that_is_changed_and_removed_with_its_parent_is_one_change() {
    let mut tree = Tree::new(&[Perm::new(Access::Read, 0)]);
    host(&mut tree, |view| view.mkdir(HOME));
    host(&mut tree, |view| view.set_perms(HOME, own(DOMID)));
    let mut transaction = Transaction::default();
    let (above, below) = (format!("{HOME}/a"), format!("{HOME}/a/b"));
    let mut view = view(&mut tree, &mut transaction, DOMID);
    view.write(&above, b"").unwrap();
    view.write(&below, b"").unwrap();
    view.rm(&above).unwrap();
    let changes = |view: &View<'_>| {
        let changes = view.transaction.changes.iter();
        changes.map(|change| (change.path.clone(), change.exact)).collect::<Vec<_>>()
    };
    // Watches above the second node are notified of the removal of the first.
    assert_eq!(changes(&view), [(above.clone(), false), (below.clone(), true)]);
    view.write(&below, b"").unwrap();
    assert_eq!(changes(&view), [(above, false), (below, false)]);
    assert!(transaction.changed() <= transaction.touched());
}

/// What a transaction sees is of two moments if others change the tree meanwhile.
#[test]
fn transaction_that_sees_a_child_go_is_to_be_repeated() {
    let mut tree = Tree::new(&[Perm::new(Access::Read, 0)]);
    let (above, below) = (format!("{HOME}/a"), format!("{HOME}/a/b"));
    for goes in [&below, &above] {
        host(&mut tree, |view| view.write(&below, b""));
        let mut transaction = Transaction::default();
        assert!(view(&mut tree, &mut transaction, 0).get(&above, Access::Read).is_ok());
        host(&mut tree, |view| view.rm(goes));
        let again = view(&mut tree, &mut transaction, 0).rm(&above);
        assert_eq!(again, Err(Errno::Eagain), "without {goes}");
        let committed = tree.commit(transaction, 0, Limits::XENSTORED);
        assert_eq!(committed.map(|changes| changes.len()), Err(Errno::Eagain), "without {goes}");
    }
    let mut transaction = Transaction::default();
    host(&mut tree, |view| view.rm(HOME));
    let absent = view(&mut tree, &mut transaction, 0).get(&above, Access::Read);
    assert_eq!(absent.map(drop), Err(Errno::Enoent));
    host(&mut tree, |view| view.write(&below, b""));
    let again = view(&mut tree, &mut transaction, 0).rm(&below);
    assert_eq!(again, Err(Errno::Eagain), "its parent was absent");
}
