// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tandem {

/// Of the report page. Nothing but tables is wider than the screen, and these scroll within themselves.
inline constexpr const char* kPageStyle = R"css(
:root { color-scheme: light dark; --page: #fff; --text: #1c1e21; --soft: #5f6670; --line: #d5d9de; --card: #f5f6f8;
  --good: #00714f; --bad: #b03a00; --link: #005f96; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #e4e6e9; --soft: #a0a7b0; --line: #383e46;
  --card: #1e2227; --good: #4fc79c; --bad: #ff9058; --link: #6cb8ea; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 3rem; max-width: 84rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 0.25rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.15rem 1.1rem; list-style: none; padding: 0; margin: 0.5rem 0; }
p { max-width: 46rem; margin: 0.5rem 0; }
p.counts { font-size: 1.1rem; font-weight: 600; }
p.warning { border-left: 4px solid var(--bad); padding-left: 0.75rem; }
.scroll { overflow-x: auto; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.8125rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.25rem 0.7rem 0.25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
td.name, td.good, td.bad { white-space: nowrap; }
.facts td.number { text-align: left; }
td.long { min-width: 16rem; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 700; }
.soft { color: var(--soft); }
details { margin: 0.25rem 0; }
summary { cursor: pointer; padding: 0.35rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1rem; margin: 0.75rem 0;
  align-items: start; }
figure { margin: 0; padding: 0.75rem; background: var(--card); border-radius: 0.5rem; min-width: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.8125rem; line-height: 1.4; color: var(--soft); margin-top: 0.25rem; }
@media print { :root { --page: #fff; --text: #000; --soft: #444; --line: #bbb; --card: #fff; --good: #00714f; --bad: #b03a00; }
  body { padding: 0; max-width: none; font-size: 10pt; } nav { display: none; } .scroll { overflow: visible; }
  table { font-size: 7pt; width: 100%; } th, td, td.name, td.number { white-space: normal; padding-right: 0.4rem; }
  td { overflow-wrap: anywhere; } h2, h3 { break-after: avoid; } td.long { min-width: 0; } .charts { grid-template-columns: 1fr 1fr; }
  details::details-content { content-visibility: visible; } }
)css";

}  // namespace tandem
