//! The nodes, and transactions over them.
//!
//! A transaction records each node as first read, and its replacement. It is committed if all nodes
//! read are unchanged; otherwise it fails and must be retried (EAGAIN). A request without a
//! transaction is a transaction of its own without conflicts.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use os::StateFile;
use serde::{Deserialize, Serialize};

use super::Limits;
use xen_netif::store::wire::{Access, Errno, Perm, parent};

/// Permissions of a node; the first names the owner. Never empty.
#[derive(Clone, Debug)]
pub struct Perms(Arc<[Perm]>);

impl Perms {
    pub fn iter(&self) -> impl Iterator<Item = &Perm> {
        self.0.iter()
    }

    fn owner(&self) -> u16 {
        self.0.first().map_or(0, |p| p.domid)
    }

    /// Access of a domain.
    pub fn access(&self, domid: u16) -> Access {
        if domid == 0 || domid == self.owner() {
            return Access::Both;
        }
        let named = self.0.iter().skip(1).find(|p| p.domid == domid);
        named.or(self.0.first()).map_or(Access::None, |p| p.access)
    }

    /// The same with another owner.
    fn owned_by(&self, domid: u16) -> Self {
        let mut perms = self.0.to_vec();
        perms.iter_mut().take(1).for_each(|first| first.domid = domid);
        Self(perms.into())
    }

    /// Whether a domain that need not be the owner is named.
    fn names(&self, domid: u16) -> bool {
        self.0.iter().skip(1).any(|p| p.domid == domid)
    }

    /// The same without a domain that is not the owner.
    fn without(&self, domid: u16) -> Self {
        let kept = self.0.iter().enumerate().filter(|(i, p)| *i == 0 || p.domid != domid);
        Self(kept.map(|(_, p)| *p).collect())
    }
}

/// One node.
#[derive(Clone, Debug)]
pub struct Node {
    pub value: Vec<u8>,
    pub perms: Perms,
    pub children: BTreeSet<String>,
    pub generation: u64,
}

impl Node {
    pub fn owner(&self) -> u16 {
        self.perms.owner()
    }

    /// Access of a domain to it.
    pub fn access(&self, domid: u16) -> Access {
        self.perms.access(domid)
    }
}

/// A changed node, and who may be notified: readers of any version of it and its parent. Their
/// permissions only: a parent's version also has the names of all its children.
#[derive(Debug)]
pub struct Change {
    pub path: String,
    /// Whether only watches of exactly this node are notified: it was last removed, with a parent,
    /// whose removal the others are notified of.
    pub exact: bool,
    pub readers: Vec<Perms>,
    /// Number of versions from the first change; the others are from the last one.
    first: usize,
}

/// Nodes read and replaced by a transaction.
#[derive(Debug, Default)]
pub struct Transaction {
    seen: BTreeMap<String, Option<Arc<Node>>>,
    replaced: BTreeMap<String, Option<Arc<Node>>>,
    /// One entry per node, however often it was changed.
    changes: Vec<Change>,
    /// Index of a path in `changes`.
    places: BTreeMap<String, usize>,
    /// Number of nodes that its domain owns more, or less, after it. Every replaced node was read,
    /// so this holds if the transaction can be committed.
    owned: isize,
}

impl Transaction {
    /// Number of nodes read.
    pub fn touched(&self) -> usize {
        self.seen.len()
    }

    /// Number of nodes to replace or to report.
    pub fn changed(&self) -> usize {
        self.replaced.len().max(self.changes.len())
    }
}

/// All nodes.
pub struct Tree {
    nodes: BTreeMap<String, Arc<Node>>,
    /// Number of nodes owned by each domain.
    owned: BTreeMap<u16, usize>,
    introduced: BTreeSet<u16>,
    generation: u64,
}

/// Version of a tree in a file.
const TREE_VERSION: u32 = 1;

impl TreeState {
    /// Reads the tree that a killed process wrote down.
    pub fn read(file: OwnedFd) -> Option<Self> {
        serde_json::from_slice(&StateFile::open(file).read(TREE_VERSION)?).ok()
    }
}

/// All nodes, for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeState {
    /// In the order of their paths, so parents first.
    nodes: Vec<NodeState>,
    introduced: BTreeSet<u16>,
    generation: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NodeState {
    path: String,
    /// Each byte as the character of its number.
    value: String,
    perms: Vec<String>,
    generation: u64,
}

/// View of one request: the tree through a transaction, as a domain.
pub struct View<'a> {
    pub tree: &'a mut Tree,
    pub transaction: &'a mut Transaction,
    pub domid: u16,
    pub limits: Limits,
}

impl Tree {
    pub fn new(perms: &[Perm]) -> Self {
        let root = Node {
            value: Vec::new(),
            perms: Perms(perms.into()),
            children: BTreeSet::new(),
            generation: 0,
        };
        let nodes = BTreeMap::from([("/".into(), Arc::new(root))]);
        Self { nodes, owned: BTreeMap::from([(0, 1)]), introduced: BTreeSet::new(), generation: 0 }
    }

    /// Returns all nodes for another process.
    pub fn export(&self) -> TreeState {
        let node = |(path, node): (&String, &Arc<Node>)| NodeState {
            path: path.clone(),
            value: node.value.iter().map(|byte| char::from(*byte)).collect(),
            perms: node.perms.iter().map(Perm::to_string).collect(),
            generation: node.generation,
        };
        TreeState {
            nodes: self.nodes.iter().map(node).collect(),
            introduced: self.introduced.clone(),
            generation: self.generation,
        }
    }

    /// Writes all nodes down; without memory, the last ones stay.
    pub fn save(&self, file: &mut StateFile) {
        if let Ok(bytes) = serde_json::to_vec(&self.export()) {
            let _ = file.write(TREE_VERSION, &bytes);
        }
    }

    /// Makes the tree of another process. Nodes without a parent or valid permissions are left
    /// out.
    pub fn import(state: TreeState) -> Self {
        let mut tree = Self::new(&[Perm::new(Access::Read, 0)]);
        for NodeState { path, value, perms, generation } in state.nodes {
            let perms = perms.iter().map(|perm| Perm::parse(perm.as_bytes()));
            let perms: Option<Vec<_>> = perms.collect();
            let Some(perms) = perms.filter(|perms| !perms.is_empty()) else { continue };
            if let Some(above) = parent(&path) {
                let Some(above) = tree.nodes.get_mut(above) else { continue };
                let name = path.rsplit('/').next().unwrap_or_default();
                Arc::make_mut(above).children.insert(name.into());
            } else if path != "/" {
                continue;
            }
            let value = value.chars().map(|c| u8::try_from(c).unwrap_or(b'?')).collect();
            let perms = Perms(perms.into());
            let node = Node { value, perms, children: BTreeSet::new(), generation };
            tree.replace(path, Some(Arc::new(node)));
        }
        (tree.introduced, tree.generation) = (state.introduced, state.generation);
        tree
    }

    /// Records a domain. Returns whether it is new.
    pub fn introduce(&mut self, domid: u16) -> bool {
        self.introduced.insert(domid)
    }

    pub fn is_introduced(&self, domid: u16) -> bool {
        self.introduced.contains(&domid)
    }

    /// Number of nodes owned by a domain.
    pub fn owned(&self, domid: u16) -> usize {
        self.owned.get(&domid).copied().unwrap_or(0)
    }

    /// Applies a transaction. Returns the changes.
    pub fn commit(
        &mut self,
        transaction: Transaction,
        domid: u16,
        limits: Limits,
    ) -> Result<Vec<Change>, Errno> {
        for (path, seen) in &transaction.seen {
            let same = match (self.nodes.get(path), seen) {
                (None, None) => true,
                (Some(now), Some(then)) => Arc::ptr_eq(now, then),
                _ => false,
            };
            if !same {
                return Err(Errno::Eagain);
            }
        }
        if domid != 0 && self.owned_with(&transaction, domid) > limits.nodes {
            return Err(Errno::Enospc);
        }
        for (path, replaced) in transaction.replaced {
            self.replace(path, replaced);
        }
        Ok(transaction.changes)
    }

    fn replace(&mut self, path: String, node: Option<Arc<Node>>) {
        if let Some(node) = &node {
            *self.owned.entry(node.owner()).or_default() += 1;
        }
        let old = match node {
            Some(node) => self.nodes.insert(path, node),
            None => self.nodes.remove(&path),
        };
        if let Some(old) = old
            && let Some(count) = self.owned.get_mut(&old.owner())
        {
            *count -= 1;
            if *count == 0 {
                self.owned.remove(&old.owner());
            }
        }
    }

    /// Number of nodes that a domain would own after its transaction.
    fn owned_with(&self, transaction: &Transaction, domid: u16) -> usize {
        self.owned(domid).saturating_add_signed(transaction.owned)
    }

    /// Removes a domain's nodes and its entries in permissions.
    pub fn remove_domain(&mut self, domid: u16) -> Vec<Change> {
        self.introduced.remove(&domid);
        let owned = self.nodes.iter().filter(|(_, n)| n.owner() == domid).map(|(p, _)| p.clone());
        let owned: Vec<String> = owned.collect();
        let mut transaction = Transaction::default();
        let limits = Limits { touched: usize::MAX, ..Limits::XENSTORED };
        let mut view = View { tree: self, transaction: &mut transaction, domid: 0, limits };
        for path in owned {
            // Removed with a parent already, or the root, which domain 0 owns.
            let _ = view.rm(&path);
        }
        let changes = self.commit(transaction, 0, limits).unwrap_or_default();
        for node in self.nodes.values_mut().filter(|node| node.perms.names(domid)) {
            let node = Arc::make_mut(node);
            node.perms = node.perms.without(domid);
        }
        changes
    }
}

impl View<'_> {
    /// A node as seen by this transaction.
    fn node(&mut self, path: &str) -> Result<Option<Arc<Node>>, Errno> {
        if let Some(replaced) = self.transaction.replaced.get(path) {
            return Ok(replaced.clone());
        }
        if let Some(seen) = self.transaction.seen.get(path) {
            return Ok(seen.clone());
        }
        if self.domid != 0 && self.transaction.seen.len() >= self.limits.touched {
            return Err(Errno::Enospc);
        }
        let node = self.tree.nodes.get(path).cloned();
        self.transaction.seen.insert(path.into(), node.clone());
        Ok(node)
    }

    fn set(&mut self, path: &str, node: Option<Node>) -> Option<Arc<Node>> {
        self.tree.generation += 1;
        let generation = self.tree.generation;
        let node = node.map(|node| Arc::new(Node { generation, ..node }));
        let domid = self.domid;
        let is_owned =
            |node: Option<&Arc<Node>>| isize::from(node.is_some_and(|n| n.owner() == domid));
        let before = self.transaction.replaced.insert(path.into(), node.clone());
        let before = before.as_ref().map_or(self.tree.nodes.get(path), Option::as_ref);
        self.transaction.owned += is_owned(node.as_ref()) - is_owned(before);
        node
    }

    /// Adds a child to an existing node. A node that the transaction has replaced before is not
    /// copied again: a thousand children would be copied a thousand times.
    fn add_child(&mut self, path: &str, name: &str) -> Result<(), Errno> {
        if !self.transaction.replaced.contains_key(path) {
            let node = self.node(path)?.ok_or(Errno::Eio)?;
            self.set(path, Some(Node::clone(&node)));
        }
        let replaced = self.transaction.replaced.get_mut(path).and_then(Option::as_mut);
        let node = Arc::make_mut(replaced.ok_or(Errno::Eio)?);
        self.tree.generation += 1;
        node.generation = self.tree.generation;
        node.children.insert(name.into());
        Ok(())
    }

    /// A node that the domain may read, or write.
    pub fn get(&mut self, path: &str, need: Access) -> Result<Arc<Node>, Errno> {
        let Some(node) = self.node(path)? else {
            // Existence is only revealed to domains that may read the parent.
            let (_, above) = self.nearest(path)?;
            let known = above.access(self.domid).reads();
            return Err(if known { Errno::Enoent } else { Errno::Eacces });
        };
        let access = node.access(self.domid);
        let granted = match need {
            Access::Write => access.writes(),
            _ => access.reads(),
        };
        if granted { Ok(node) } else { Err(Errno::Eacces) }
    }

    /// The lowest existing node above `path`.
    fn nearest(&mut self, path: &str) -> Result<(String, Arc<Node>), Errno> {
        let mut at = path;
        while let Some(above) = parent(at) {
            if let Some(node) = self.node(above)? {
                return Ok((above.into(), node));
            }
            at = above;
        }
        Err(Errno::Enoent)
    }

    fn change(&mut self, path: &str, exact: bool, also: Vec<Perms>) {
        let mut readers = also;
        for path in [Some(path), parent(path)].into_iter().flatten() {
            readers.extend(self.node(path).ok().flatten().map(|node| node.perms.clone()));
        }
        let Transaction { changes, places, .. } = &mut *self.transaction;
        let at = *places.entry(path.into()).or_insert(changes.len());
        match changes.get_mut(at) {
            Some(change) => {
                change.exact = exact;
                // Intermediate versions in a transaction are never visible.
                change.readers.truncate(change.first);
                change.readers.extend(readers);
            }
            None => {
                let first = readers.len();
                changes.push(Change { path: path.into(), exact, readers, first });
            }
        }
    }

    pub fn write(&mut self, path: &str, value: &[u8]) -> Result<(), Errno> {
        if self.domid != 0 && value.len() > self.limits.value_len {
            return Err(Errno::Enospc);
        }
        match self.node(path)? {
            Some(_) => {
                let node = self.get(path, Access::Write)?;
                self.set(path, Some(Node { value: value.to_vec(), ..Node::clone(&node) }));
            }
            None => self.create(path, value)?,
        }
        self.change(path, false, Vec::new());
        Ok(())
    }

    pub fn mkdir(&mut self, path: &str) -> Result<(), Errno> {
        if self.node(path)?.is_some() {
            return self.get(path, Access::Write).map(drop);
        }
        self.create(path, &[])?;
        self.change(path, false, Vec::new());
        Ok(())
    }

    /// Creates a node with all missing parents. They get the permissions of the lowest existing
    /// node, and belong to their creator.
    fn create(&mut self, path: &str, value: &[u8]) -> Result<(), Errno> {
        let (mut above, node) = self.nearest(path)?;
        if !node.access(self.domid).writes() {
            return Err(Errno::Eacces);
        }
        let perms = match self.domid {
            0 => node.perms.clone(),
            domid => node.perms.owned_by(domid),
        };
        let base = if above == "/" { "" } else { above.as_str() };
        let missing = path.get(base.len() + 1..).unwrap_or_default();
        let names: Vec<&str> = missing.split('/').collect();
        if self.domid != 0 {
            let owned = self.tree.owned_with(self.transaction, self.domid);
            if owned + names.len() > self.limits.nodes {
                return Err(Errno::Enospc);
            }
        }
        drop(node);
        for (i, name) in names.iter().enumerate() {
            self.add_child(&above, name)?;
            let child = if above == "/" { format!("/{name}") } else { format!("{above}/{name}") };
            let value = if i + 1 == names.len() { value.to_vec() } else { Vec::new() };
            let created =
                Node { value, perms: perms.clone(), children: BTreeSet::new(), generation: 0 };
            self.set(&child, Some(created));
            above = child;
        }
        Ok(())
    }

    pub fn rm(&mut self, path: &str) -> Result<(), Errno> {
        let Some(up) = parent(path) else { return Err(Errno::Einval) };
        if self.node(path)?.is_none() {
            // A missing node below an existing one counts as removed.
            return self.get(up, Access::Read).map(drop);
        }
        let node = self.get(path, Access::Write)?;
        // What this transaction saw of one moment does not fit what it sees now, of a later one. It
        // can no longer be committed.
        let above = self.node(up)?.ok_or(Errno::Eagain)?;
        let mut gone = vec![(path.to_string(), node)];
        let mut next = 0;
        while let Some((at, node)) = gone.get(next) {
            let children: Vec<String> =
                node.children.iter().map(|name| format!("{at}/{name}")).collect();
            for child in children {
                let node = self.node(&child)?.ok_or(Errno::Eagain)?;
                gone.push((child, node));
            }
            next += 1;
        }
        let mut without = Node::clone(&above);
        without.children.remove(path.rsplit('/').next().unwrap_or_default());
        self.set(up, Some(without));
        for (i, (path, node)) in gone.into_iter().enumerate() {
            self.set(&path, None);
            self.change(&path, i > 0, vec![node.perms.clone()]);
        }
        Ok(())
    }

    pub fn set_perms(&mut self, path: &str, perms: Vec<Perm>) -> Result<(), Errno> {
        let node = self.get(path, Access::Write)?;
        if self.domid != 0 {
            if node.owner() != self.domid {
                return Err(Errno::Eacces);
            }
            if perms.first().is_none_or(|p| p.domid != self.domid) {
                return Err(Errno::Eperm);
            }
            if perms.len() > self.limits.perms {
                return Err(Errno::Enospc);
            }
        }
        if perms.is_empty() {
            return Err(Errno::Einval);
        }
        self.set(path, Some(Node { perms: Perms(perms.into()), ..Node::clone(&node) }));
        self.change(path, false, vec![node.perms.clone()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
