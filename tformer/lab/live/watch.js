// The live page: asks the server for what is new, and draws it. Whatever runs are called is text, never markup.
'use strict'

const EVERY = 1500 // milliseconds between questions
const MOST = 100 // rows of the table of arms
const DRAWN = 6 // curves in the plot, besides that of the chosen arm
const COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9'] // Okabe & Ito
const SVG = 'http://www.w3.org/2000/svg'

const state = { life: '', version: 0, arms: [], curves: {}, names: [], arm: '', trial: '', trials: [] }
const at = (id) => document.getElementById(id)

function element(name, attributes = {}, ...parts) {
  const made = name === 'svg' || name === 'path' || name === 'line' || name === 'text'
    ? document.createElementNS(SVG, name) : document.createElement(name)
  for (const [key, value] of Object.entries(attributes)) {
    if (key === 'onclick') made.onclick = value
    else made.setAttribute(key, value)
  }
  made.append(...parts.map((part) => part instanceof Node ? part : String(part)))
  return made
}

const short = (value) => value === null || value === undefined ? '-' : Number(value.toPrecision(4)).toString()
const whole = (value) => Math.round(value).toLocaleString('en')
const steps = (each) => whole(each.step) + (each.num_steps ? '/' + whole(each.num_steps) : '')

function path([x, y], [left, right, bottom, top], [low, high, least, most]) {
  const place = (value, from, to, a, b) => to > from ? a + (value - from) / (to - from) * (b - a) : (a + b) / 2
  const points = x.map((step, i) =>
    `${place(step, low, high, left, right).toFixed(1)},${place(y[i], least, most, bottom, top).toFixed(1)}`)
  return points.length ? 'M' + points.join('L') : ''
}

function bounds(curves) {
  const x = curves.flatMap((curve) => curve[0])
  const y = curves.flatMap((curve) => curve[1])
  const end = (values, pick) => values.reduce((a, b) => pick(a, b), values[0])
  return [end(x, Math.min), end(x, Math.max), end(y, Math.min), end(y, Math.max)]
}

function sparkline(arm) {
  const of = state.curves[arm] || {}
  const curve = [...state.names].reverse().map((name) => of[name]).find((each) => each && each[0].length > 2)
  const made = element('svg', { class: 'spark', viewBox: '0 0 110 22', 'aria-hidden': 'true' })
  if (curve) made.append(element('path', { d: path(curve, [1, 109, 20, 2], bounds([curve])) }))
  return made
}

function plot() {
  const name = at('name').value
  const arms = state.arms.map((line) => line.arm)
  const chosen = arms.slice(0, DRAWN)
  if (state.arm && !chosen.includes(state.arm)) chosen.push(state.arm)
  const drawn = chosen.map((arm) => [arm, (state.curves[arm] || {})[name]]).filter(([, curve]) => curve && curve[0].length)
  const frame = [60, 800, 262, 12]
  const parts = []
  const legend = []
  if (drawn.length) {
    const limits = bounds(drawn.map(([, curve]) => curve))
    for (let i = 0; i <= 4; i++) {
      const y = 262 - i * 62.5
      parts.push(element('line', { x1: 60, x2: 800, y1: y, y2: y }))
      const value = limits[2] + (limits[3] - limits[2]) * i / 4
      parts.push(element('text', { x: 52, y: y + 4, 'text-anchor': 'end' }, short(value)))
      const step = limits[0] + (limits[1] - limits[0]) * i / 4
      parts.push(element('text', { x: 60 + i * 185, y: 282, 'text-anchor': i === 4 ? 'end' : 'middle' }, whole(step)))
    }
    drawn.forEach(([arm, curve], i) => {
      const colour = arm === state.arm && i >= DRAWN ? 'currentColor' : COLOURS[i % COLOURS.length]
      const line = element('path', { d: path(curve, frame, limits), style: `stroke: ${colour}` })
      if (arm === state.arm) line.style.strokeWidth = 3
      line.append(element('title', {}, arm))
      parts.push(line)
      legend.push(element('li', {}, element('span', { style: `color: ${colour}` }, '\u25A0 '), arm))
    })
    parts.push(element('text', { x: 800, y: 298, 'text-anchor': 'end' }, 'steps'))
  }
  at('plot').replaceChildren(...parts)
  at('legend').replaceChildren(...legend)
}

function table() {
  const words = at('filter').value.toLowerCase()
  const found = state.arms.filter((line) => line.arm.toLowerCase().includes(words))
  at('more').textContent = found.length > MOST ? `the first ${MOST} of ${whole(found.length)} are shown` : ''
  at('arms').replaceChildren(...found.slice(0, MOST).map((line) => element('tr', { 'aria-selected': line.arm === state.arm },
    element('td', {}, element('button', { class: 'sort', onclick: () => choose(line.arm) }, line.arm)),
    element('td', {}, Object.entries(line.states).map(([name, count]) => `${count} ${name}`).join(', ')),
    element('td', {}, steps(line)),
    element('td', {}, short(line.train)),
    element('td', {}, short(line.valid)),
    element('td', {}, sparkline(line.arm)),
    element('td', {}, short(line.mean)),
    element('td', {}, line.label || '-'))))
}

function trials() {
  at('trials-title').textContent = state.arm ? `Trials of ${state.arm}` : 'Trials'
  at('trials').replaceChildren(...state.trials.map((each) => element('tr', { 'aria-selected': each.directory === state.trial },
    element('td', {}, element('button', { class: 'sort', onclick: () => { state.trial = each.directory; ask() } }, each.directory)),
    element('td', {}, each.state + (each.left ? `, ${each.left} left` : '')),
    element('td', {}, steps(each)),
    element('td', {}, each.error || ''))))
}

function choose(arm) {
  state.arm = arm
  state.trial = ''
  ask()
}

function take(found) {
  if (found.life !== state.life) Object.assign(state, { life: found.life, curves: {} })
  state.trials = found.arm === state.arm && found.trials ? found.trials : []
  if (!state.trial && state.trials.length) {
    state.trial = (state.trials.find((each) => each.state === 'running') || state.trials[0]).directory
  }
  if (found.arms) {
    Object.assign(state, { arms: found.arms, names: found.names })
    Object.assign(state.curves, found.curves)
    at('headline').textContent = found.headline
    at('about').textContent = found.about
    at('head').replaceChildren(element('tr', {}, ...['arm', 'trials', 'step', 'train loss', 'valid loss', 'curve', ...found.heads]
      .map((name) => element('th', { scope: 'col' }, name))))
    at('broken').replaceChildren(...found.broken.map((line) => element('li', {}, line)))
    at('broken-part').hidden = !found.broken.length
    if (at('name').options.length !== found.names.length) {
      at('name').replaceChildren(...found.names.map((name) => element('option', {}, name)))
    }
  }
  state.version = found.version
  table()
  plot()
  trials()
}

let asking = false
async function ask() {
  if (asking) return
  asking = true
  try {
    const given = new URLSearchParams({ life: state.life, version: state.version, arm: state.arm })
    const answer = await fetch(`state?${given}`)
    const found = await answer.json()
    if (found.error) throw new Error(found.error)
    take(found)
    if (state.trial) {
      const lines = await (await fetch(`log?${new URLSearchParams({ trial: state.trial })}`)).json()
      at('log').textContent = lines.length ? lines.join('\n') : 'there is no log'
    }
    at('problem').hidden = true
  } catch (error) {
    at('problem').textContent = `no answer: ${error.message}`
    at('problem').hidden = false
  }
  asking = false
}

at('filter').oninput = table
at('name').onchange = plot
ask()
setInterval(ask, EVERY)
