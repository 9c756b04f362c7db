//! The `schema` field: each document names itself and its version.

use std::fmt;
use std::marker::PhantomData;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A JSON document with a name of its own.
pub trait Document {
    /// The name with its version, such as `shoal.status/0`. The version rises when a field is renamed or changes
    /// its type, not when one is added.
    const NAME: &'static str;
}

/// The `schema` field of document `D`. It has one value, so a document cannot be labelled wrongly, and reading
/// another document's text as a `D` fails with both names.
pub struct Schema<D>(PhantomData<fn() -> D>);

impl<D> Schema<D> {
    /// The only value.
    pub const fn new() -> Self {
        Schema(PhantomData)
    }
}

impl<D> Default for Schema<D> {
    fn default() -> Self {
        Schema::new()
    }
}

impl<D> Clone for Schema<D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D> Copy for Schema<D> {}

impl<D> PartialEq for Schema<D> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<D> Eq for Schema<D> {}

impl<D: Document> fmt::Debug for Schema<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(D::NAME)
    }
}

impl<D: Document> Serialize for Schema<D> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(D::NAME)
    }
}

impl<'de, D: Document> Deserialize<'de> for Schema<D> {
    fn deserialize<T: Deserializer<'de>>(deserializer: T) -> Result<Self, T::Error> {
        let name = String::deserialize(deserializer)?;
        if name == D::NAME {
            Ok(Schema::new())
        } else {
            Err(T::Error::custom(format!("expected a document {}, got {name}", D::NAME)))
        }
    }
}
