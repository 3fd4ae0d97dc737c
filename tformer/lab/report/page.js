// The page of a report: tables that sort and filter, and drawings that share one choice of arms. The live page has the
// drawings too: watch.js fills `data` there. Whatever arms are called is text, never markup.
'use strict'

const data = JSON.parse(document.getElementById('data').textContent)
const COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9']
const DASHES = ['', '7 3', '7 3 2 3', '2 3']
const SHOWN = 20 // rows of a table that are not folded
const SVG = new DOMParser().parseFromString('<svg></svg>', 'text/html').body.firstChild.namespaceURI

/** Returns an element with attributes and children; children that are text are text. */
function make(tag, attributes = {}, ...children) {
  const drawn = /^(svg|g|path|line|circle|rect|text|title)$/.test(tag)
  const made = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value)
    else if (value === true) made.setAttribute(name, '')
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value)
  }
  made.append(...children)
  return made
}

/** Returns a field that tells `then` what readers look for. */
function finder(what, then) {
  const told = (event) => then(event.target.value)
  return make('input', { type: 'search', placeholder: `filter ${what}`, 'aria-label': `Filter ${what}`, oninput: told })
}

/** Returns whether every word that is looked for is in a text. */
function holds(text, wanted) {
  return wanted.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word))
}

// ------------------------------------------------------------------------------------------------------------ tables

/** Returns the first number of a cell's text, with its sign and without separators; NaN if it begins with none. */
function leading(text) {
  const found = text.replace(/,/g, '').match(/^<?\s*([+-]?\d+(\.\d+)?(e[+-]?\d+)?)/i)
  return found ? Number(found[1]) : NaN
}

/** Makes a table's columns sort it, and a long table's rows be found by what stands in them. */
function enliven(held) {
  const table = held.querySelector('table'), bodies = [...table.tBodies], heads = [...table.tHead.rows[0].cells]
  const rows = [...table.querySelectorAll('tbody tr')]
  if (rows.length < 3) return
  const texts = new Map(rows.map((row) => [row, [...row.cells].map((cell) => cell.textContent.trim())]))
  let wanted = '', order = rows

  function arrange() {
    order.forEach((row) => { row.hidden = !holds(texts.get(row).join(' '), wanted) })
    const kept = order.filter((row) => !row.hidden), least = bodies.length > 1 ? SHOWN : kept.length
    bodies[0].append(...kept.slice(0, least), ...order.filter((row) => row.hidden))
    if (bodies.length > 1) bodies[1].append(...kept.slice(least))
  }

  function sort(head, column) {
    const up = head.getAttribute('aria-sort') !== 'ascending'
    heads.forEach((each) => each.removeAttribute('aria-sort'))
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending')
    const known = rows.map((row) => [row, leading(texts.get(row)[column]), texts.get(row)[column]])
    const numeric = known.some(([, number]) => !Number.isNaN(number))
    known.sort(([, a, s], [, b, t]) => {
      if (!numeric) return (up ? 1 : -1) * s.localeCompare(t)
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) // unknown ones last
      return (up ? 1 : -1) * (a - b)
    })
    order = known.map(([row]) => row)
    arrange()
  }

  heads.forEach((head, column) => {
    const onclick = () => sort(head, column)
    head.append(make('button', { type: 'button', class: 'sort', title: 'Sort', onclick }, ...head.childNodes))
  })
  if (bodies.length > 1) {
    held.querySelector('.options').prepend(finder('rows', (given) => { wanted = given; arrange() }))
  }
}

// -------------------------------------------------------------------------------------------------------------- arms

const arms = data.arms || []
const chosen = new Set(arms.slice(0, data.drawn).keys())
const charts = []

function colour(arm) { return arm === 0 ? 'var(--ink)' : COLOURS[(arm - 1) % COLOURS.length] }
function dash(arm) { return arm === 0 ? '' : DASHES[Math.floor((arm - 1) / COLOURS.length) % DASHES.length] }
function short(text, most = 44) {
  const letters = [...text] // an emoji is one
  return letters.length <= most ? text : [...letters.slice(0, most / 2), '…', ...letters.slice(1 - most / 2)].join('')
}
function key(arm) {
  const line = make('line', { x1: 1, x2: 23, y1: 6, y2: 6, stroke: colour(arm), 'stroke-width': 3, 'stroke-dasharray': dash(arm) })
  return make('svg', { class: 'key', viewBox: '0 0 24 12', 'aria-hidden': 'true' }, line)
}

/** Returns the list of all arms, by which readers choose what every drawing shows. */
function chooser() {
  const boxes = arms.map((name, arm) => {
    const onchange = () => { box.checked ? chosen.add(arm) : chosen.delete(arm); redraw() }
    const box = make('input', { type: 'checkbox', checked: chosen.has(arm), onchange })
    return { name, box, line: make('label', {}, box, key(arm), make('code', {}, name)) }
  })
  const choose = (wanted) => {
    chosen.clear()
    boxes.forEach(({ box, line }, arm) => {
      box.checked = wanted(arm, line)
      if (box.checked) chosen.add(arm)
    })
    redraw()
  }
  const find = finder('arms', (wanted) => boxes.forEach(({ name, line }) => { line.hidden = !holds(name, wanted) }))
  const button = (text, wanted) => make('button', { type: 'button', onclick: () => choose(wanted) }, text)
  return make('details', { class: 'chooser' }, make('summary', {}, 'Arms in the drawings'),
    make('div', { class: 'options' }, find,
      button(`the best ${Math.min(data.drawn, arms.length)}`, (arm) => arm < data.drawn),
      button('those listed', (arm, line) => !line.hidden), button('the baseline alone', (arm) => arm === 0)),
    make('div', { class: 'choices' }, ...boxes.map(({ line }) => line)))
}

function redraw() { charts.forEach((draw) => draw()) }

// ------------------------------------------------------------------------------------------------------------- scales

function written(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '-'
  const size = Math.abs(value)
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, 'e').replace('e+', 'e')
  return size >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)))
}

/** Returns at most `most` round numbers from `low` to `high`; on a logarithmic axis times 1, 2 and 5 of powers. */
function ticks(low, high, most, log) {
  if (log) {
    const first = Math.floor(Math.log10(low)), decades = Array.from({ length: 2 + Math.log10(high) - first }, (_, i) => first + i)
    const inside = (steps) => decades.flatMap((e) => steps.map((step) => Number(`${step}e${e}`)))
      .filter((x) => x >= low * 0.999 && x <= high * 1.001)
    const found = [[1, 2, 5], [1, 3], [1]].map(inside).find((all) => all.length <= most && all.length > 1)
    if (found) return found
    if (inside([1]).length > 1) return inside([1]).filter((_, i, all) => i % Math.ceil(all.length / most) === 0)
  }
  const rough = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || power
  const found = []
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)))
  return found
}

/** Returns a function from values to pixels, with its ends in `domain`. */
function scale(values, from, to, log, room = 0.05) {
  const of = log ? Math.log10 : (x) => x, back = log ? (x) => 10 ** x : (x) => x
  let low = Infinity, high = -Infinity
  for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value) }
  if (low > high) [low, high] = log ? [1, 10] : [0, 1]
  let [a, b] = [of(low), of(high)]
  const more = (b - a) * room || Math.abs(a) * 0.05 || 1
  ;[a, b] = [a - more, b + more]
  const at = (value) => from + (of(value) - a) / (b - a) * (to - from)
  at.domain = [back(a), back(b)]
  return at
}

function spans(values) {
  const known = values.filter((value) => Number.isFinite(value))
  const least = Math.min(...known)
  return known.length > 1 && least > 0 && Math.max(...known) >= 10 * least
}

/** Returns the running mean of values by exponential weights, corrected at its beginning; 0 is none. */
function smoothed(values, weight) {
  let sum = 0, mass = 0
  return values.map((value) => {
    if (!weight || value === null) return value
    sum = weight * sum + (1 - weight) * value
    mass = weight * mass + 1 - weight
    return sum / mass
  })
}

// ------------------------------------------------------------------------------------------------------------- charts

/** What each kind shows: its axes, and for an arm its points [x, y, low, high]; rows: y is a row of its own. */
const KINDS = {
  curves: (name) => ({
    x: 'steps', y: name.replace(/[\W_]+/g, ' '), lines: true,
    points(arm, weight) {
      const curve = data.curves[name]?.[arm]
      if (!curve) return []
      const [steps, mean, sd] = [data.steps[curve[0]], smoothed(curve[1], weight), curve[2]]
      return steps.map((step, i) => [step, mean[i], ...(sd && !weight ? [mean[i] - sd[i], mean[i] + sd[i]] : [])])
    },
  }),
  pareto: (cost) => ({
    x: cost === 'flops' ? 'FLOPs' : cost, y: data.metric, points: (arm) => scored(arm, data.columns[cost]),
    front: data.fronts[cost].map((arm) => [data.columns[cost][arm], data.columns.mean[arm]]),
  }),
  fields: (field) => ({ x: field, y: data.metric, points: (arm) => scored(arm, data.fields[field]), faint: true }),
  forest: () => ({
    x: `difference of ${data.metric}`, rows: true, points(arm) {
      const { difference, low, high } = data.columns
      return difference[arm] === null ? [] : [[difference[arm], arm, low[arm], high[arm]]]
    },
  }),
}

function scored(arm, column) {
  const { mean, sd } = data.columns
  if (column[arm] === null || mean[arm] === null) return []
  return [[column[arm], mean[arm], ...(sd[arm] === null ? [] : [mean[arm] - sd[arm], mean[arm] + sd[arm]])]]
}

/** Puts a drawing that readers can change in the place of a still one. */
function chart(figure) {
  let of = figure.dataset.of, weight = 0
  const kind = figure.dataset.kind, caption = figure.querySelector('figcaption')
  if (kind === 'fields') of = Object.keys(data.fields)[0]
  if (!KINDS[kind] || of === undefined) return
  const place = make('div', { class: 'drawing' }), told = make('div', { class: 'told', hidden: true })
  const legend = make('div', { class: 'legend' })
  const logs = { x: null, y: null }, toggles = {} // null: as the values are
  for (const axis of ['x', 'y']) {
    toggles[axis] = make('input', { type: 'checkbox', onchange: () => { logs[axis] = toggles[axis].checked; draw() } })
  }
  const options = make('div', { class: 'options' })
  if (kind === 'fields') {
    const onchange = (event) => { of = event.target.value; logs.x = null; draw() }
    options.append(make('select', { 'aria-label': 'Field', onchange }, ...Object.keys(data.fields).map((each) => make('option', {}, each))))
  }
  if (kind !== 'forest') for (const axis of ['x', 'y']) options.append(make('label', {}, toggles[axis], `log ${axis}`))
  if (kind === 'curves') {
    const oninput = (event) => { weight = Number(event.target.value); draw() }
    options.append(make('label', {}, 'smooth', make('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: 0, oninput })))
  }
  figure.querySelector('svg')?.remove()
  figure.prepend(options, place, legend)

  function draw() {
    const about = KINDS[kind](of), width = Math.max(place.clientWidth, 240)
    const shown = [...chosen].sort((a, b) => a - b).map((arm) => [arm, about.points(arm, weight)]).filter(([, p]) => p.length)
    const others = about.faint ? arms.flatMap((_, arm) => chosen.has(arm) ? [] : about.points(arm)) : []
    const front = (about.front || []).sort((a, b) => a[0] - b[0])
    const all = [...shown.flatMap(([, points]) => points), ...others, ...front]
    const height = about.rows ? 50 + 34 * Math.max(shown.length, 1) : Math.max(230, Math.min(320, 0.62 * width))
    const xs = all.map((point) => point[0]), ys = all.map((point) => point[1])
    const log = { x: logs.x ?? (kind !== 'curves' && !about.rows && spans(xs)), y: logs.y ?? (kind === 'fields' && spans(ys)) }
    for (const axis of ['x', 'y']) {
      const values = axis === 'x' ? xs : ys
      toggles[axis].disabled = values.some((value) => value !== null && value <= 0)
      if (toggles[axis].disabled) log[axis] = false
      toggles[axis].checked = log[axis]
    }
    const ends = (i) => all.flatMap((point) => [point[i], ...(about.rows === (i === 0) ? point.slice(2) : [])])
    const late = about.lines && !log.y // the first tenth of the steps may lie outside the frame
      ? shown.flatMap(([, points]) => points.slice(Math.floor(points.length / 10)).map((point) => point[1])) : ys
    const whole = about.rows || about.lines ? [] : all.flatMap((point) => point.slice(2).filter((end) => !log.y || end > 0))
    const guess = scale([...late, ...whole], height - 40, 12, log.y)
    const marks = about.rows ? [] : ticks(...guess.domain, Math.floor(height / 45), log.y)
    const left = about.rows ? 8 : 30 + 7 * Math.max(1, ...marks.map((mark) => written(mark).length))
    const x = scale(about.rows ? [...ends(0), 0] : xs, left, width - 14, log.x, about.lines ? 0.01 : 0.05)
    const y = about.rows ? (row) => 34 + 34 * row : guess
    const svg = make('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', width, height },
      make('title', {}, caption.textContent.trim()))
    const bottom = height - 40
    for (const mark of ticks(...x.domain, Math.floor((width - left) / 80), log.x)) {
      svg.append(make('line', { x1: x(mark), x2: x(mark), y1: 8, y2: bottom, class: 'grid' }),
        make('text', { x: x(mark), y: bottom + 15, 'text-anchor': 'middle', class: 'tick' }, written(mark)))
    }
    for (const mark of marks) {
      svg.append(make('line', { x1: left, x2: width - 14, y1: y(mark), y2: y(mark), class: 'grid' }),
        make('text', { x: left - 5, y: y(mark) + 4, 'text-anchor': 'end', class: 'tick' }, written(mark)))
    }
    svg.append(make('text', { x: (left + width) / 2, y: height - 6, 'text-anchor': 'middle' }, short(about.x, Math.floor(width / 9))))
    if (about.y) {
      const up = `rotate(-90 12 ${bottom / 2})`
      svg.append(make('text', { x: 12, y: bottom / 2, 'text-anchor': 'middle', transform: up }, short(about.y, Math.floor(bottom / 9))))
    }
    const inside = make('svg', { x: left, y: 0, width: width - left, height: bottom, viewBox: `${left} 0 ${width - left} ${bottom}` })
    svg.append(inside)
    if (about.rows) inside.append(make('line', { x1: x(0), x2: x(0), y1: 0, y2: bottom, class: 'axis' }))
    if (others.length) {
      const dots = others.map(([a, b]) => `M${x(a).toFixed(1)} ${y(b).toFixed(1)}h0`).join('')
      inside.append(make('path', { d: dots, class: 'others' }))
    }
    if (front.length) {
      const line = front.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('L')
      inside.append(make('path', { d: `M${line}`, class: 'front' }))
    }
    const near = []
    shown.forEach(([arm, points], row) => {
      const look = { stroke: colour(arm), 'stroke-dasharray': dash(arm) }
      const at = points.filter((point) => point[1] !== null).map((point) => [x(point[0]), about.rows ? y(row) : y(point[1]), point])
      if (about.lines) {
        const bands = at.filter(([, , point]) => point.length > 2)
        if (bands.length > 1 && !(log.y && bands.some(([, , point]) => point[2] <= 0))) {
          const edge = (i) => bands.map(([a, , point]) => `${a.toFixed(1)} ${y(point[i]).toFixed(1)}`)
          inside.append(make('path', { d: `M${[...edge(3), ...edge(2).reverse()].join('L')}Z`, fill: colour(arm), class: 'band' }))
        }
        const line = at.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join('L')
        inside.append(make('path', { d: `M${line}${at.length < 2 ? 'h0' : ''}`, class: 'curve', ...look }))
      } else {
        for (const [a, b, [, , low, high]] of at) {
          if (Number.isFinite(low) && Number.isFinite(high)) {
            const bar = about.rows ? { x1: x(low), x2: x(high), y1: b, y2: b }
              : { x1: a, x2: a, y1: log.y && low <= 0 ? bottom : y(low), y2: y(high) }
            inside.append(make('line', { ...bar, stroke: colour(arm), 'stroke-width': 1.5 }))
          }
          const fill = dash(arm) ? 'var(--card)' : colour(arm) // arms of one colour differ
          inside.append(make('circle', { cx: a, cy: b, r: 4.5, fill, stroke: colour(arm), 'stroke-width': 2 }))
        }
      }
      if (about.rows) {
        const text = short(`${arms[arm]}: ${data.labels[arm]}`, Math.floor(width / 8))
        svg.append(make('text', { x: left, y: y(row) - 9, class: 'tick' }, text))
      }
      near.push(...at.map(([a, b, point]) => [a, b, point, arm]))
    })
    svg.addEventListener('pointermove', (event) => tell(event, svg, near, about))
    svg.addEventListener('pointerleave', () => { told.hidden = true })
    place.replaceChildren(svg, told)
    legend.replaceChildren(...(about.rows ? [] : shown.map(([arm]) => make('span', {}, key(arm), short(arms[arm])))))
  }

  /** Writes the values of the point that the pointer is nearest to. */
  function tell(event, svg, near, about) {
    const box = svg.getBoundingClientRect(), [px, py] = [event.clientX - box.left, event.clientY - box.top]
    let best = null, least = 900
    for (const each of near) {
      const distance = (each[0] - px) ** 2 + (each[1] - py) ** 2
      if (distance < least) [best, least] = [each, distance]
    }
    told.hidden = !best
    if (!best) return
    const [a, b, [x, y, low, high], arm] = best
    const value = about.rows ? `${written(x)}${Number.isFinite(low) ? ` (${written(low)} to ${written(high)})` : ''}`
      : `${about.y} ${written(y)}${Number.isFinite(low) ? ` ± ${written(y - low)}` : ''} at ${about.x} ${written(x)}`
    told.textContent = `${short(arms[arm])}: ${value}`
    told.style.left = `${Math.max(0, Math.min(a + 12, box.width - told.offsetWidth))}px`
    told.style.top = `${b + 14}px`
  }

  charts.push(draw)
  draw()
}

/** Makes the drawings of the page, and the choice of their arms. */
function begin() {
  const drawn = [...document.querySelectorAll('figure[data-kind]')].filter((figure) => KINDS[figure.dataset.kind])
  if (!arms.length || !drawn.length) return
  drawn[0].closest('.figures').before(chooser())
  drawn.forEach(chart)
}

document.querySelectorAll('.held').forEach(enliven)
begin()
addEventListener('resize', redraw)
