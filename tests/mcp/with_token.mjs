// Loaded before the conformance suite, which has no option for it: every request carries the bearer token of
// BATHY_MCP_TOKEN. The suite sends through undici's global dispatcher (as the built-in fetch does) and, where it wants
// every byte of a header to be its own, through node:http.
import http from "node:http";
import { createRequire } from "node:module";

// The suite's own undici: this file lies elsewhere.
const { Agent, setGlobalDispatcher } = createRequire(process.argv[1])("undici");

const token = process.env.BATHY_MCP_TOKEN;
if (!token) throw new Error("BATHY_MCP_TOKEN is not set");

const withToken = (given = {}) =>
  Array.isArray(given)
    ? [...given, "authorization", `Bearer ${token}`]
    : { ...(given[Symbol.iterator] ? Object.fromEntries(given) : given), authorization: `Bearer ${token}` };

const dispatchWithToken = (dispatch) => (options, handler) =>
  dispatch({ ...options, headers: withToken(options.headers ?? undefined) }, handler);
setGlobalDispatcher(new Agent().compose(dispatchWithToken));

const request = http.request;
http.request = (...given) => {
  const at = given.findIndex((argument) => typeof argument === "object" && !(argument instanceof URL));
  if (at < 0) throw new Error("a request without options: it would have no token");
  given[at] = { ...given[at], headers: withToken(given[at].headers) };
  return request(...given);
};
