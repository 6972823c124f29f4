//! Checks on a driver's JSON.

pub use serde_json::Value as Json;

/// Accessors that fail if a value has another type.
pub trait Look {
    fn text(&self) -> &str;
    fn number(&self) -> f64;
    /// The items of an array.
    fn items(&self) -> &[Json];
    /// Whether an object has a member of this name.
    fn has(&self, name: &str) -> bool;
}

impl Look for Json {
    fn text(&self) -> &str {
        self.as_str().unwrap_or_else(|| panic!("not a string: {self:?}"))
    }

    fn number(&self) -> f64 {
        self.as_f64().unwrap_or_else(|| panic!("not a number: {self:?}"))
    }

    fn items(&self) -> &[Json] {
        self.as_array().unwrap_or_else(|| panic!("not an array: {self:?}"))
    }

    fn has(&self, name: &str) -> bool {
        self.as_object().unwrap_or_else(|| panic!("not an object: {self:?}")).contains_key(name)
    }
}
