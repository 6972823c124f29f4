//! How a registry knows who asks: not at all, by user and password, or by a token that another server gives.

pub mod challenge;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, StatusCode};
use serde::Deserialize;
use thiserror::Error;
use zeroize::Zeroizing;

use crate::credentials::{Credentials, Secret};
use crate::http::{Call, Content, HttpError, Link, Origin, Scheme, Url, encoded};
use crate::text::plain;
use challenge::{Challenge, ChallengeError};

const MAX_TOKEN_ANSWER: u64 = 256 << 10;
const CLIENT: &str = "bathysphere";

/// Why there is no token.
#[derive(Debug, Error)]
pub enum AuthError {
    #[error("{0} asks for a login in a way that is not understood")]
    Challenge(Origin, #[source] ChallengeError),
    #[error("{0} asks for a login in none of the known ways (Basic, Bearer)")]
    Scheme(Origin),
    #[error("{0} names {1:?} as where tokens are given out, which is not an https address")]
    Realm(Origin, String),
    #[error("Cannot get a token")]
    Http(#[source] HttpError),
    #[error("{0} does not accept this login")]
    Rejected(Origin),
    #[error("{0} gives no token: it answers with {1}")]
    Status(Origin, StatusCode),
    #[error("{0} gives a token that cannot be used")]
    Token(Origin),
}

/// What is asked for: rights on a repository, or nothing but to be known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    pub origin: Origin,
    pub scope: Option<String>,
}

/// What was found out about authorization, shared by all that talk to registries.
#[derive(Default)]
pub struct Tokens {
    known: Mutex<HashMap<Scope, HeaderValue>>,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tokens", self.known().len())
    }
}

#[derive(Deserialize)]
struct Answer {
    token: Option<Secret>,
    access_token: Option<Secret>,
}

impl Tokens {
    fn known(&self) -> MutexGuard<'_, HashMap<Scope, HeaderValue>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of the Authorization header that was right before.
    pub fn of(&self, scope: &Scope) -> Option<HeaderValue> {
        self.known().get(scope).cloned()
    }

    /// Finds what to send after a registry refused a request. None if there is nothing else to try.
    pub fn answer(
        &self,
        link: &mut Link<'_>,
        scope: &Scope,
        refused: Refused<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Option<HeaderValue>, AuthError> {
        let Refused { headers, used } = refused;
        let known = self.of(scope);
        // Another thread was faster.
        if known.is_some() && known.as_ref() != used {
            return Ok(known);
        }
        let origin = &scope.origin;
        let mut challenges = Vec::new();
        for value in headers.get_all(WWW_AUTHENTICATE) {
            let found = challenge::parse(value.as_bytes());
            challenges.extend(found.map_err(|error| AuthError::Challenge(origin.clone(), error))?);
        }
        let of_scheme = |scheme: &str| challenges.iter().find(|found| found.scheme == scheme);
        let value = if let Some(bearer) = of_scheme("bearer") {
            let token = fetch(link, scope, bearer, credentials)?;
            let text = Zeroizing::new(format!("Bearer {}", token.reveal()));
            sensitive(&text).ok_or_else(|| AuthError::Token(origin.clone()))?
        } else if of_scheme("basic").is_some() {
            match credentials.and_then(basic) {
                // The same once more would not help.
                Some(value) if Some(&value) != used => value,
                _ => return Ok(None),
            }
        } else if challenges.is_empty() {
            return Ok(None);
        } else {
            return Err(AuthError::Scheme(origin.clone()));
        };
        self.known().insert(scope.clone(), value.clone());
        Ok(Some(value))
    }
}

/// A request that a registry refused with 401.
#[derive(Clone, Copy)]
pub struct Refused<'a> {
    /// The headers of the response.
    pub headers: &'a HeaderMap,
    /// The Authorization header of the request.
    pub used: Option<&'a HeaderValue>,
}

fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn basic(credentials: &Credentials) -> Option<HeaderValue> {
    let Credentials::Password { user, password } = credentials else { return None };
    let text = Zeroizing::new(format!("{user}:{}", password.reveal()));
    sensitive(&Zeroizing::new(format!("Basic {}", BASE64_STANDARD.encode(text.as_bytes()))))
}

/// Gets a token for a scope that this client chose, from the server that the registry named.
fn fetch(
    link: &mut Link<'_>,
    scope: &Scope,
    challenge: &Challenge,
    credentials: Option<&Credentials>,
) -> Result<Secret, AuthError> {
    let realm = realm(scope, challenge)?;
    let mut pairs = Vec::new();
    pairs.extend(challenge.parameter("service").map(|service| ("service", service)));
    pairs.extend(scope.scope.as_deref().map(|scope| ("scope", scope)));
    let call = match credentials {
        Some(Credentials::IdentityToken(token)) => {
            pairs.extend([
                ("grant_type", "refresh_token"),
                ("client_id", CLIENT),
                ("refresh_token", token.reveal()),
            ]);
            let form: Vec<_> =
                pairs.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
            let mut call = Call::new(Method::POST, realm);
            call.content = Content::Bytes(form.join("&").into());
            call.with(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"))
        }
        other => {
            let url = pairs.iter().fold(realm, |url, (name, value)| url.with_query(name, value));
            let authorization = other.and_then(basic);
            let call = Call::get(url);
            authorization.into_iter().fold(call, |call, value| call.with(AUTHORIZATION, value))
        }
    };
    let response = link.send(&call).map_err(AuthError::Http)?;
    let (status, origin) = (response.status, response.url.origin.clone());
    match status.as_u16() {
        200 => {}
        400 | 401 | 403 => return Err(AuthError::Rejected(origin)),
        _ => return Err(AuthError::Status(origin, status)),
    }
    let text = Zeroizing::new(link.read(response, MAX_TOKEN_ANSWER).map_err(AuthError::Http)?);
    let answer: Option<Answer> = serde_json::from_slice(&text).ok();
    let token = answer.and_then(|answer| answer.token.or(answer.access_token));
    token.filter(|token| !token.reveal().is_empty()).ok_or(AuthError::Token(origin))
}

/// Where tokens come from. Only a registry on this machine that is itself reached without TLS may name such a place.
fn realm(scope: &Scope, challenge: &Challenge) -> Result<Url, AuthError> {
    let text = challenge.parameter("realm").unwrap_or_default();
    let wrong = || AuthError::Realm(scope.origin.clone(), plain(text, 200));
    let url = Url::parse(text).map_err(|_| wrong())?;
    let is_plain_here = scope.origin.scheme == Scheme::Http && url.origin.is_loopback();
    if url.origin.scheme == Scheme::Https || is_plain_here { Ok(url) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn realm_of(registry: &str, realm_text: &str) -> Result<Url, AuthError> {
        let scope = Scope { origin: Url::parse(registry).unwrap().origin, scope: None };
        let header = format!("Bearer realm=\"{realm_text}\"");
        realm(&scope, &challenge::parse(header.as_bytes()).unwrap()[0])
    }

    #[test]
    fn tokens_come_over_tls_or_from_this_machine() {
        realm_of("https://ghcr.io", "https://auth.example.com/token").unwrap();
        realm_of("http://localhost:5000", "http://127.0.0.1:5001/token").unwrap();
        for (registry, realm) in [
            ("https://ghcr.io", "http://auth.example.com/token"),
            ("https://ghcr.io", "http://127.0.0.1/token"),
            ("http://localhost:5000", "http://auth.example.com/token"),
            ("https://ghcr.io", "/token"),
            ("https://ghcr.io", "ftp://x/"),
            ("https://ghcr.io", "https://user@x/"),
            ("https://ghcr.io", ""),
        ] {
            assert!(matches!(realm_of(registry, realm), Err(AuthError::Realm(..))), "{realm}");
        }
    }

    #[test]
    fn authorization_is_not_shown() {
        let password = Secret::new("hunter2".into());
        let value = basic(&Credentials::Password { user: "me".into(), password }).unwrap();
        assert_eq!(value.as_bytes(), b"Basic bWU6aHVudGVyMg==");
        assert!(!format!("{value:?}").contains("bWU6"));
        let tokens = Tokens::default();
        let scope = Scope { origin: Url::parse("https://x").unwrap().origin, scope: None };
        tokens.known().insert(scope, value);
        assert_eq!(format!("{tokens:?}"), "1 tokens");
    }
}
