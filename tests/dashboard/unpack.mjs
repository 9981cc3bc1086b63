// Unpacks the Chromium that a package carries: `node unpack.mjs <the package's bin> <where to>`.
// Each file is compressed with Brotli, which Node knows; libraries and fonts lie in archives, which tar knows.

import { execFileSync } from "node:child_process";
import { chmodSync, createReadStream, createWriteStream, mkdirSync } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const [from, to] = process.argv.slice(2);
mkdirSync(to, { recursive: true });

const unpack = (name, target) =>
  pipeline(createReadStream(`${from}/${name}`), createBrotliDecompress(), createWriteStream(target));

await unpack("chromium.br", `${to}/chromium`);
chmodSync(`${to}/chromium`, 0o755);
for (const name of ["al2023.tar", "swiftshader.tar", "fonts.tar"]) {
  await unpack(`${name}.br`, `${to}/${name}`);
  execFileSync("tar", ["-xf", `${to}/${name}`, "-C", to, "--no-same-owner"]);
}
