"use strict";
const at = (id) => document.getElementById(id);

// Titles, ids and values come from data that nobody has checked: they only ever become text, or a picture's address.
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

