//! What changed between two versions of the swarm's document.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Version;
use crate::api::{Document, Schema};

/// The lists of the document whose elements are told apart by a key, and the fields that make it.
const KEYED: &[(&str, &[&str])] = &[
    ("nodes", &["id"]),
    ("links", &["a", "b", "kind", "a_address", "b_address"]),
    ("instances", &["id"]),
    ("downloads", &["node", "model"]),
    ("refused", &["id"]),
];

/// What changed from one version to the next. Applied to the document of version `from` it gives that of `seq`, up
/// to the order of the keyed lists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delta {
    /// `shoal.delta/0`.
    pub schema: Schema<Self>,
    /// The version it starts from.
    pub from: u64,
    /// The version it leads to.
    pub seq: u64,
    /// Fields of the document that have a new value: `time`, and what else changed.
    pub set: Map<String, Value>,
    /// Changes of the lists `nodes` and `instances` (key `id`), `links` (`a b kind a_address b_address`), `downloads` (`node model`) and
    /// `refused` (`id`); lists without changes are left out.
    pub lists: BTreeMap<String, KeyedDelta>,
}

impl Document for Delta {
    const NAME: &'static str = "shoal.delta/0";
}

/// What changed in one list.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyedDelta {
    /// Elements that are new or changed, whole.
    pub set: Vec<Value>,
    /// Keys of the elements that are gone; the fields of a key are joined by a space.
    pub gone: Vec<String>,
}

impl Delta {
    /// What leads from `old` to `new`.
    pub fn between(old: &Version, new: &Version) -> Delta {
        let mut delta = Delta {
            schema: Schema::new(),
            from: old.seq,
            seq: new.seq,
            set: Map::new(),
            lists: BTreeMap::new(),
        };
        for (name, value) in &new.document {
            let before = old.document.get(name);
            match KEYED.iter().find(|(list, _)| list == name) {
                Some((_, key)) => {
                    let changes = changes(elements(before), elements(Some(value)), key);
                    if !changes.set.is_empty() || !changes.gone.is_empty() {
                        delta.lists.insert(name.clone(), changes);
                    }
                }
                None if before != Some(value) => {
                    delta.set.insert(name.clone(), value.clone());
                }
                None => {}
            }
        }
        delta
    }

    /// Brings a document from version `from` to version `seq`.
    pub fn apply(&self, document: &mut Map<String, Value>) {
        for (name, value) in &self.set {
            document.insert(name.clone(), value.clone());
        }
        for (name, changes) in &self.lists {
            let Some((_, key)) = KEYED.iter().find(|(list, _)| list == name) else { continue };
            let list = document.entry(name.clone()).or_insert_with(|| Value::Array(Vec::new()));
            let Value::Array(list) = list else { continue };
            list.retain(|element| !changes.gone.contains(&key_of(element, key)));
            for element in &changes.set {
                let name = key_of(element, key);
                match list.iter_mut().find(|old| key_of(old, key) == name) {
                    Some(old) => *old = element.clone(),
                    None => list.push(element.clone()),
                }
            }
        }
    }
}

fn changes(old: &[Value], new: &[Value], key: &[&str]) -> KeyedDelta {
    let mut before: BTreeMap<String, &Value> =
        old.iter().map(|element| (key_of(element, key), element)).collect();
    let mut set = Vec::new();
    for element in new {
        if before.remove(&key_of(element, key)) != Some(element) {
            set.push(element.clone());
        }
    }
    KeyedDelta { set, gone: before.into_keys().collect() }
}

fn elements(list: Option<&Value>) -> &[Value] {
    list.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn key_of(element: &Value, key: &[&str]) -> String {
    let fields: Vec<&str> =
        key.iter().map(|name| element.get(name).and_then(Value::as_str).unwrap_or("")).collect();
    fields.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn version(seq: u64, document: Value) -> Version {
        let Value::Object(document) = document else { panic!("not an object") };
        Version { seq, document }
    }

    #[test]
    fn a_delta_leads_from_one_version_to_the_next() {
        let old = version(
            3,
            json!({"seq": 3, "scheduler": "a", "swarm": "s",
                "nodes": [{"id": "a", "state": "ready"}, {"id": "b", "state": "ready"}, {"id": "c", "state": "gone"}],
                "links": [{"a": "a", "b": "b", "kind": "ethernet", "state": "tcp"}],
                "instances": []}),
        );
        let new = version(
            7,
            json!({"seq": 7, "scheduler": null, "swarm": "s",
                "nodes": [{"id": "a", "state": "ready"}, {"id": "b", "state": "suspect"}, {"id": "d", "state": "joining"}],
                "links": [{"a": "a", "b": "b", "kind": "ethernet", "state": "tcp"}],
                "instances": [{"id": "i"}]}),
        );
        let delta = Delta::between(&old, &new);
        assert_eq!(
            serde_json::to_value(&delta).unwrap(),
            json!({"schema": "shoal.delta/0", "from": 3, "seq": 7,
                "set": {"seq": 7, "scheduler": null},
                "lists": {
                    "nodes": {"set": [{"id": "b", "state": "suspect"}, {"id": "d", "state": "joining"}], "gone": ["c"]},
                    "instances": {"set": [{"id": "i"}], "gone": []}}})
        );
        let mut document = old.document.clone();
        delta.apply(&mut document);
        assert_eq!(document, new.document);
        let mut again = new.document.clone();
        delta.apply(&mut again);
        assert_eq!(again, new.document, "applying twice changes nothing");
    }

    #[test]
    fn nothing_changed_is_an_empty_delta() {
        let version = version(1, json!({"seq": 1, "nodes": [{"id": "a"}]}));
        let delta = Delta::between(&version, &version);
        assert!(delta.set.is_empty() && delta.lists.is_empty());
    }
}
